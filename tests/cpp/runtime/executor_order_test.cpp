// What the ranks reduce together, whatever order gradients come in and whichever rank lacks one.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/executor.h"

#include "support/whole_params.h"

namespace dc {
namespace {

using testing::addAll;
using testing::close;
using testing::errorOf;
using testing::expectMeans;
using testing::gradientOf;
using testing::graphOf;
using testing::GroupSetup;
using testing::meanGradient;
using testing::plainParams;
using testing::Rank;
using testing::runBackward;
using testing::runRanks;
using testing::sliceOf;
using testing::Whole;
using testing::World;

class ExecutorOrder : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  // Large enough for all of plainParams in one bucket, or too small for any two of them.
  GroupSetup setup(std::int64_t bucket_size = 64, int ranks = 2) const {
    return {ranks, GetParam(), bucket_size, testing::configOfTests()};
  }
};

void give(CustomOpExecutor& graph, const Rank& rank, std::int64_t id, int backward = 0) {
  graph.reduceGrad(gradientOf(rank.rank(), id, plainParams()[id - 1].numel, backward), id);
}

TEST_P(ExecutorOrder, GradientsMayArriveInAnotherOrderOnOneRank) {
  for (const int bucket_size : {6, 64}) {
    runRanks(setup(bucket_size), [](Rank& rank) {
      const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
      for (int step = 0; step < 3; ++step) {
        graph->startBackward(true);
        for (const int id : rank.rank() == 0 ? std::vector<int>{3, 1, 2} : std::vector<int>{1, 2, 3}) {
          give(*graph, rank, id, step);
        }
        graph->endBackward();
        expectMeans(rank, plainParams(), {step});
      }
    });
  }
}

TEST_P(ExecutorOrder, AfterTheFirstBackwardTheOrderIsThatOfRank0AndNothingIsParkedAnyMore) {
  runRanks(setup(6), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    const auto backward = [&] {
      graph->startBackward(true);
      for (const int id : {2, 3, 1}) {  // not the reverse of the registration
        give(*graph, rank, id);
      }
      graph->endBackward();
    };
    backward();
    const auto parked = rank.context->stats.gradients_parked.load();
    EXPECT_GT(parked, 0);
    backward();
    EXPECT_EQ(rank.context->stats.gradients_parked, parked);
    expectMeans(rank, plainParams());
  });
}

TEST_P(ExecutorOrder, AGradientThatOneRankLacksCountsAsZerosThere) {
  for (const int bucket_size : {6, 64}) {
    runRanks(setup(bucket_size), [](Rank& rank) {
      const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
      for (int step = 0; step < 2; ++step) {
        graph->startBackward(true);
        for (const int id : {3, 2, 1}) {
          if (id != 2 || rank.rank() == 0) {
            give(*graph, rank, id, step);
          }
        }
        graph->endBackward();
        const Whole second = plainParams()[1];
        EXPECT_TRUE(close(rank.gradient(2), sliceOf(second, rank, gradientOf(0, 2, second.numel, step) / 2)));
        EXPECT_TRUE(graph->reducer().withoutGradient().ids().empty()) << "one rank had it";
        expectMeans(rank, {plainParams()[0], plainParams()[2]}, {step});
      }
    });
  }
}

TEST_P(ExecutorOrder, AGradientThatAllRanksLackIsKnownAsSuchAndLeavesZeros) {
  for (const bool pre_divide : {true, false}) {
    GroupSetup with = setup();
    with.config.pre_div_reduce = pre_divide;
    runRanks(with, [](Rank& rank) {
      const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
      runBackward(*graph, rank, plainParams());
      EXPECT_TRUE(graph->reducer().withoutGradient().ids().empty());
      graph->startBackward(true);
      give(*graph, rank, 3, 1);
      give(*graph, rank, 1, 1);
      graph->endBackward();
      EXPECT_EQ(graph->reducer().withoutGradient().ids(), (std::vector<std::int64_t>{2}));
      EXPECT_TRUE(close(rank.gradient(2), at::zeros_like(rank.gradient(2))));
      EXPECT_EQ(rank.context->stats.gradients_missing, 1);
    });
  }
}

TEST_P(ExecutorOrder, SeveralGradientsOfOneParameterAddUpInOneBucketAndInSeveral) {
  for (const int bucket_size : {6, 10, 64}) {
    runRanks(setup(bucket_size), [](Rank& rank) {
      const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
      for (int step = 0; step < 2; ++step) {  // the second has learned of the repeat
        graph->startBackward(true);
        give(*graph, rank, 3);
        give(*graph, rank, 2, 0);
        give(*graph, rank, 1);
        give(*graph, rank, 2, 1);
        graph->endBackward();
        expectMeans(rank, {plainParams()[1]}, {0, 1});
        expectMeans(rank, {plainParams()[0], plainParams()[2]});
      }
    });
  }
}

TEST_P(ExecutorOrder, SeveralGradientsOfOneParameterAddUpInTheDtypeOfItsBuffer) {
  runRanks(setup(), [](Rank& rank) {
    rank.addWhole(1, {4}, rank.rank() == 0 ? Slice{0, 4} : Slice{0, 0}).setReduceDtype(at::kBFloat16);
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1});
    rank.agree();
    graph->startBackward(true);
    graph->reduceGrad(at::full({4}, 256.0), 1);
    graph->reduceGrad(at::ones({4}), 1);  // lost beside 256 in bf16, not in the fp32 of the buffer
    graph->endBackward();
    EXPECT_TRUE(at::all(rank.gradient(1) == 257).item<bool>());
  });
}

TEST_P(ExecutorOrder, ARepeatThatOneRankLacksCountsAsZerosThere) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    const auto backward = [&](bool repeat) {
      graph->startBackward(true);
      for (const int id : {3, 2, 1}) {
        give(*graph, rank, id);
      }
      if (repeat) {
        give(*graph, rank, 2, 1);
      }
      graph->endBackward();
    };
    backward(true);
    backward(rank.rank() == 0);
    const Whole second = plainParams()[1];
    const at::Tensor expected = meanGradient(2, 2, second.numel) + gradientOf(0, 2, second.numel, 1) / 2;
    EXPECT_TRUE(close(rank.gradient(2), sliceOf(second, rank, expected)));
  });
}

TEST_P(ExecutorOrder, TwoGraphsShareTheBucketsAndAParameterOfBothAddsUp) {
  for (const int bucket_size : {6, 64}) {
    runRanks(setup(bucket_size), [](Rank& rank) {
      addAll(rank, plainParams());
      const auto first = rank.graph<Z2CustomOpExecutor>(1, {1, 2});
      const auto second = rank.graph<Z2CustomOpExecutor>(2, {2, 3});
      rank.agree();
      for (int step = 0; step < 2; ++step) {
        first->startBackward(true);
        second->startBackward(true);
        give(*second, rank, 3);
        give(*first, rank, 2, 0);
        give(*second, rank, 2, 1);
        give(*first, rank, 1);
        second->endBackward();
        first->endBackward();
        expectMeans(rank, {plainParams()[1]}, {0, 1});
        expectMeans(rank, {plainParams()[0], plainParams()[2]});
      }
    });
  }
}

TEST_P(ExecutorOrder, AGraphThatGoesLeavesNothingOfItsOwnInTheBuckets) {
  runRanks(setup(), [](Rank& rank) {
    addAll(rank, plainParams());
    auto gone = rank.graph<Z2CustomOpExecutor>(1, {1, 2, 3});
    const auto graph = rank.graph<Z2CustomOpExecutor>(2, {1, 2, 3});
    rank.agree();
    gone->startBackward(true);
    give(*gone, rank, 3, 7);
    rank.graphs.clear();
    gone.reset();
    runBackward(*graph, rank, plainParams());
    expectMeans(rank, plainParams());
  });
}

TEST_P(ExecutorOrder, AGraphMayNotListAParameterTwice) {
  World world(setup());
  Rank rank(world, 0);
  EXPECT_EQ(errorOf([&] { rank.graph<Z2CustomOpExecutor>(1, {1, 2, 1}); }),
            "a graph lists a parameter twice: ids 1, 2, 1");
}

TEST_P(ExecutorOrder, TwoGraphsThatTheirFirstGradientsOpenShareAParameterToo) {
  runRanks(setup(), [](Rank& rank) {
    addAll(rank, plainParams());
    const auto first = rank.graph<Z2CustomOpExecutor>(1, {1, 2});
    const auto second = rank.graph<Z2CustomOpExecutor>(2, {2, 3});
    rank.agree();
    for (int step = 0; step < 2; ++step) {
      give(*first, rank, 2, 0);
      give(*first, rank, 1);
      give(*second, rank, 3);
      give(*second, rank, 2, 1);
      first->endBackward();
      second->endBackward();
      expectMeans(rank, {plainParams()[1]}, {0, 1});
    }
  });
}

// Not so yet: the surplus enters the bucket of that rank alone, and the ranks reduce different buckets.
TEST_P(ExecutorOrder, AGradientBeyondTheExpectedCountOnOneRankAloneCountsAsZerosOnTheOthers) {
  for (const int more : {0, 1}) {
    runRanks(setup(), [more](Rank& rank) {
      const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
      graph->startBackward(true);
      for (const int id : {3, 2, 1}) {
        give(*graph, rank, id);
      }
      if (rank.rank() == more) {
        give(*graph, rank, 2, 1);
      }
      graph->endBackward();
      const Whole second = plainParams()[1];
      const at::Tensor expected = meanGradient(2, 2, second.numel) + gradientOf(more, 2, second.numel, 1) / 2;
      EXPECT_TRUE(close(rank.gradient(2), sliceOf(second, rank, expected)));
    });
  }
}

// Not so yet: what was in the bucket when the backward was given up is reduced with the next.
TEST_P(ExecutorOrder, ABackwardThatWasGivenUpLeavesNothingForTheNext) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    graph->startBackward(true);
    give(*graph, rank, 3, 7);
    runBackward(*graph, rank, plainParams());
    expectMeans(rank, plainParams());
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, ExecutorOrder, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
