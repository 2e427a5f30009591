// One backward of ZeRO-2, which is the base of the executors and nothing else: what arrives in the gradient buffers.
#include "deepcompile/runtime/executor.h"

#include <mutex>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/whole_params.h"

namespace dc {
namespace {

using testing::awkwardParams;
using testing::close;
using testing::errorOf;
using testing::expectMeans;
using testing::giveGradients;
using testing::gradientOf;
using testing::graphOf;
using testing::GroupSetup;
using testing::plainParams;
using testing::Rank;
using testing::runBackward;
using testing::runRanks;
using testing::Whole;
using testing::World;

class Executor : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(int ranks, std::int64_t bucket_size = 64) const {
    return {ranks, GetParam(), bucket_size, testing::configOfTests()};
  }
};

TEST_P(Executor, EachRankReceivesItsSlicesOfTheMean) {
  World world(setup(3));
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, awkwardParams());
    runBackward(*graph, rank, awkwardParams());
    expectMeans(rank, awkwardParams());
    EXPECT_EQ(rank.context->stats.gradients_reduced, 6);
    EXPECT_EQ(rank.context->stats.buckets_flushed, 1);
  });
}

TEST_P(Executor, ManySmallBucketsGiveTheSame) {
  runRanks(setup(3, 10), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, awkwardParams());
    for (int step = 0; step < 3; ++step) {
      runBackward(*graph, rank, awkwardParams(), true, step);
      expectMeans(rank, awkwardParams(), {step});
    }
    EXPECT_EQ(rank.context->stats.buckets_flushed, 3 * 4);
  });
}

TEST_P(Executor, APlannedBucketIsReducedWhenItsLastGradientIsThere) {
  runRanks(setup(3), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, awkwardParams());
    graph->reducer().plan({{6, 4}, {3, 2}, {1, 5}});  // gradients come as 6, 5, 4, 3, 2, 1
    for (int step = 0; step < 2; ++step) {
      graph->startBackward(true);
      const auto before = rank.context->stats.buckets_flushed.load();
      for (const std::int64_t id : {6, 5, 4, 3, 2, 1}) {
        const Whole param = awkwardParams()[static_cast<std::size_t>(id - 1)];
        graph->reduceGrad(gradientOf(rank.rank(), id, param.numel, step), id);
        const int planned = id > 4 ? 0 : id > 2 ? 1 : 2;
        EXPECT_EQ(rank.context->stats.buckets_flushed - before, planned) << "after parameter " << id;
      }
      graph->endBackward();
      EXPECT_EQ(rank.context->stats.buckets_flushed - before, 3);
      expectMeans(rank, awkwardParams(), {step});
    }
  });
}

TEST_P(Executor, APlannedBucketMayBeLargerThanTheBucketSize) {
  runRanks(setup(2, 1), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    graph->reducer().plan({{3, 2, 1}});
    runBackward(*graph, rank, plainParams());
    expectMeans(rank, plainParams());
    EXPECT_EQ(rank.context->stats.buckets_flushed, 1);
    graph->startBackward(true);
    EXPECT_HAS(errorOf([&] { graph->reducer().forgetOrder(); }),
               "what is trainable changes in the middle of a backward");
    giveGradients(*graph, rank, plainParams());
    graph->endBackward();
  });
}

TEST_P(Executor, ReductionsThatArePlannedWithinABackwardHoldFromTheNextOneOn) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    const auto flushed = [&] { return rank.context->stats.buckets_flushed.load(); };
    graph->startBackward(true);
    graph->reducer().plan({{3}, {2}, {1}});
    giveGradients(*graph, rank, plainParams());
    graph->endBackward();
    EXPECT_EQ(flushed(), 1);
    runBackward(*graph, rank, plainParams());
    EXPECT_EQ(flushed(), 1 + 3);
    graph->reducer().plan({});
    runBackward(*graph, rank, plainParams());
    EXPECT_EQ(flushed(), 1 + 3 + 1);
    expectMeans(rank, plainParams());
  });
}

TEST_P(Executor, ABucketGrowsForAGradientThatIsLargerThanIt) {
  runRanks(setup(2, 1), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams());
    expectMeans(rank, plainParams());
  });
}

TEST_P(Executor, AtOneRankTheGradientGoesStraightIntoItsBuffer) {
  const std::vector<Whole> params = {{1, 4, {{0, 4}}}, {2, 3, {{0, 3}}}};
  World world(setup(1));
  runRanks(world, [&](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, params);
    for (int step = 0; step < 2; ++step) {
      runBackward(*graph, rank, params, true, step);
      expectMeans(rank, params, {step});
    }
  });
  EXPECT_TRUE(world.reductions->history().empty());
}

TEST_P(Executor, GradientsOfAnyShapeLayoutAndDtypeAreTaken) {
  runRanks(setup(2), [](Rank& rank) {
    rank.addWhole(1, {2, 3}, rank.rank() == 0 ? Slice{0, 4} : Slice{4, 6});
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1});
    rank.agree();
    graph->startBackward(true);
    const at::Tensor empty =
        graph->reduceGrad(at::arange(6, at::kFloat).view({3, 2}).t().to(at::kBFloat16) * (1 + 2 * rank.rank()), 1);
    graph->endBackward();
    EXPECT_EQ(empty.numel(), 0);
    EXPECT_EQ(empty.scalar_type(), at::kBFloat16);
    const at::Tensor mean = at::tensor({0.F, 4.F, 8.F, 2.F, 6.F, 10.F});
    EXPECT_TRUE(at::equal(rank.gradient(1), rank.rank() == 0 ? mean.narrow(0, 0, 4) : mean.narrow(0, 4, 2)));
    graph->startBackward(true);
    EXPECT_EQ(graph->reduceGrad(at::zeros({2, 3}), 1).scalar_type(), at::kFloat);
    graph->endBackward();
  });
}

TEST_P(Executor, TheCallerMayChangeTheGradientAfterItWasTakenAtTheLatestAtTheEndOfTheBackward) {
  runRanks(setup(2, 4), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    graph->startBackward(true);
    std::vector<at::Tensor> given;
    for (const Whole& param : {plainParams()[2], plainParams()[1], plainParams()[0]}) {
      given.push_back(gradientOf(rank.rank(), param.id, param.numel));
      graph->reduceGrad(given.back(), param.id);
    }
    graph->endBackward();
    for (const at::Tensor& gradient : given) {
      gradient.fill_(100);
    }
    expectMeans(rank, plainParams());
  });
}

TEST_P(Executor, EachDtypeTravelsInABucketOfItsOwnInOneOrder) {
  World world(setup(2));
  runRanks(world, [](Rank& rank) {
    rank.addWhole(1, {4}, rank.rank() == 0 ? Slice{0, 4} : Slice{0, 0}, at::kDouble);
    rank.addWhole(2, {4}, rank.rank() == 0 ? Slice{0, 1} : Slice{1, 4}, at::kBFloat16);
    rank.addWhole(3, {4}, rank.rank() == 0 ? Slice{0, 1} : Slice{1, 4}, at::kFloat);
    rank.registry->getParam(3).setReduceDtype(at::kBFloat16);
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1, 2, 3});
    rank.agree();
    graph->startBackward(true);
    for (const int id : {3, 2, 1}) {
      graph->reduceGrad(at::full({4}, 1.0 + rank.rank()), id);
    }
    graph->endBackward();
    for (const int id : {1, 2, 3}) {
      EXPECT_TRUE(at::all(rank.gradient(id) == 1.5).item<bool>()) << id;
    }
    EXPECT_EQ(rank.gradient(3).scalar_type(), at::kFloat);
  });
  const auto history = world.reductions->history();
  ASSERT_GE(history.size(), 2u);
  EXPECT_TRUE(history[0].ends_with(" of 4+4")) << history[0] << ": one part per parameter, and who had a gradient";
  EXPECT_TRUE(history[1].ends_with(" of 4+4+6")) << history[1];
}

TEST_P(Executor, NoRankSendsMoreThanWhatOthersOwn) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams());
    std::int64_t others = 0;
    for (const Whole& param : plainParams()) {
      others += param.numel - param.owners[rank.rank()].size();
    }
    const std::int64_t presence = 3 + 1;  // a word per parameter, and one for gradients beyond the expected
    EXPECT_EQ(rank.context->traffic->bytes(Collective::ReduceScatter), 4 * (others + presence));
  });
}

TEST_P(Executor, DividingBeforeTheSumKeepsSixteenBitGradientsInRange) {
  for (const bool pre_divide : {true, false}) {
    GroupSetup with = setup(2);
    with.config.pre_div_reduce = pre_divide;
    runRanks(with, [](Rank& rank) {
      rank.addWhole(1, {4}, rank.rank() == 0 ? Slice{0, 4} : Slice{0, 0}, at::kHalf);
      const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1});
      rank.agree();
      graph->startBackward(true);
      graph->reduceGrad(at::full({4}, 60000, at::kHalf), 1);
      graph->endBackward();
      EXPECT_TRUE(at::all(rank.gradient(1) == 60000).item<bool>());
    });
  }
}

TEST_P(Executor, WhileProfilingNothingIsReducedAndGradientBuffersStay) {
  World world(setup(2));
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    rank.context->profiling = true;
    runBackward(*graph, rank, plainParams());
    EXPECT_TRUE(close(rank.gradient(2), at::zeros_like(rank.gradient(2))));
    rank.context->profiling = false;
    runBackward(*graph, rank, plainParams());
    expectMeans(rank, plainParams());
  });
}

TEST_P(Executor, EndingABackwardThatIsNotOpenDoesNothing) {
  World world(setup(2));
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    graph->endBackward();
    EXPECT_FALSE(graph->reducer().open());
  });
  EXPECT_TRUE(world.reductions->history().empty());
}

TEST_P(Executor, TheFirstGradientOpensABackwardWhenNoneIsOpen) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    for (int step = 0; step < 2; ++step) {
      EXPECT_FALSE(graph->reducer().open());
      testing::giveGradients(*graph, rank, plainParams(), step);
      EXPECT_TRUE(graph->reducer().open());
      EXPECT_TRUE(graph->reducer().begunByGradient());
      graph->endBackward();
      expectMeans(rank, plainParams(), {step});
    }
  });
}

TEST_P(Executor, WithoutAContextItMakesOneFromTheCommunicator) {
  World world(setup(2));
  Rank rank(world, 1);
  const Z2CustomOpExecutor graph(nullptr, rank.registry, rank.buckets, {}, rank.reduce_comm, rank.reduce_stream,
                                 rank.copy_stream, true);
  EXPECT_EQ(graph.context()->place, "rank 1 of 2");
}

INSTANTIATE_TEST_SUITE_P(Modes, Executor, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

// The bits of all gradient buffers after two backwards that accumulate, by rank.
std::vector<std::vector<at::Tensor>> bitsWith(const GroupSetup& setup, at::ScalarType dtype) {
  std::vector<std::vector<at::Tensor>> bits(setup.ranks);
  runRanks(setup, [&](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, awkwardParams(), dtype);
    runBackward(*graph, rank, awkwardParams(), false, 0);
    runBackward(*graph, rank, awkwardParams(), true, 1);
    for (const Whole& param : awkwardParams()) {
      bits[rank.rank()].push_back(rank.gradient(param.id).clone());
    }
  });
  return bits;
}

TEST(ExecutorBits, DoNotDependOnBucketSizeDoubleBufferingOrStreams) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto expected = bitsWith({3, CpuStreamMode::Inline, 1000, testing::configOfTests()}, dtype);
    for (const CpuStreamMode mode : {CpuStreamMode::Inline, CpuStreamMode::Worker}) {
      for (const bool double_buffer : {false, true}) {
        for (const std::int64_t bucket_size : {1, 11, 16, 40}) {
          GroupSetup setup{3, mode, bucket_size, testing::configOfTests()};
          setup.config.double_buffer = double_buffer;
          const auto found = bitsWith(setup, dtype);
          for (int r = 0; r < setup.ranks; ++r) {
            for (std::size_t i = 0; i < expected[r].size(); ++i) {
              EXPECT_TRUE(at::equal(found[r][i], expected[r][i]))
                  << testing::nameOf(mode) << ", double_buffer " << double_buffer << ", bucket " << bucket_size;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dc
