// ZeRO-3 when something is wrong: errors of gathers, and the mistakes that debug mode finds.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/z3_executor.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;
using testing::errorsOfRanks;
using testing::GroupSetup;
using testing::Rank;
using testing::runRanks;
using testing::World;

const std::vector<std::int64_t> kIds = {1, 2};
at::Tensor valuesOf(std::int64_t id) { return at::arange(6, at::kFloat) + id; }

class Z3Failure : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(bool debug) const {
    GroupSetup setup{2, GetParam(), 16, testing::configOfTests()};
    setup.config.debug = debug;
    return setup;
  }
};

std::shared_ptr<Z3CustomOpExecutor> graphOf(Rank& rank) {
  for (const std::int64_t id : kIds) {
    rank.addSharded(id, valuesOf(id)).setName(concat("layer", id));
  }
  auto graph = rank.graph<Z3CustomOpExecutor>(4, kIds);
  rank.agree();
  return graph;
}

// From now on a collective gives up soon.
void hurry(Rank& rank) { rank.gather_comm->setTimeout(0.4); }

TEST_P(Z3Failure, AFailedGatherSurfacesAtItsWaitAndOnlyThere) {
  World world(setup(false));
  world.gathers->failAt(1, 2);  // after the agreement and the first gather
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    hurry(rank);
    const at::Tensor good = graph->allgatherParam(1, std::nullopt);
    at::Tensor bad;
    EXPECT_EQ(errorOf([&] { bad = graph->allgatherParam(2, std::nullopt); }), "");
    EXPECT_EQ(errorOf([&] { graph->gatherer().wait(good, 1); }), "");
    EXPECT_TRUE(at::equal(good, valuesOf(1)));
    const std::string error = errorOf([&] { graph->gatherer().wait(bad, 2); });
    EXPECT_HAS(error, concat("gathering parameter 'layer2' (id 2, shape [6], Float) (graph 4) on ", rank.context->place,
                             " failed: "));
    EXPECT_HAS(error, rank.rank() == 1 ? "rank 1 was told to fail" : "rank 0 waited too long");
  });
}

TEST_P(Z3Failure, AGatherThatOneRankSkipsIsADeadlineThatNamesTheParameter) {
  World world(setup(false));
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    hurry(rank);
    if (rank.rank() == 0) {
      graph->gatherer().wait(graph->allgatherParam(1, std::nullopt), 1);
    }
  });
  EXPECT_HAS(errors[0],
             "gathering parameter 'layer1' (id 1, shape [6], Float) (graph 4) on rank 0 of 2 failed: rank 0 waited");
}

TEST_P(Z3Failure, DebugModeNamesTheRanksThatGatherDifferentParameters) {
  World world(setup(true));
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    const std::int64_t id = 1 + rank.rank();  // of equal size: without debug the values would be silently wrong
    graph->gatherer().wait(graph->allgatherParam(id, std::nullopt), id);
  });
  for (const std::string& error : errors) {
    EXPECT_HAS(
        error,
        "different collectives:\n  rank 1 has gather of parameters 2\n  where rank 0 has gather of parameters 1");
  }
}

TEST_P(Z3Failure, DebugModeRefusesAReadBeforeTheWait) {
  runRanks(setup(true), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor full = graph->allgatherParam(1, std::nullopt);
    EXPECT_HAS(errorOf([&] { full.const_data_ptr<float>(); }),
               concat("parameter 'layer1' (id 1, shape [6], Float) is read before wait_allgather (graph 4, ",
                      rank.context->place, ")"));
    graph->gatherer().wait(full, 1);
    EXPECT_TRUE(at::equal(full, valuesOf(1)));
  });
}

TEST_P(Z3Failure, DebugModeFillsReleasedMemoryWithNaN) {
  runRanks(setup(true), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor full = graph->allgatherParam(1, std::nullopt);
    graph->gatherer().wait(full, 1);
    const auto* memory = full.const_data_ptr<float>();
    graph->gatherer().release(1, 1);
    const Buffer again = rank.pool->take(24);
    ASSERT_EQ(again.memory.get(), memory);
    EXPECT_TRUE(std::isnan(memory[0]));
  });
}

TEST_P(Z3Failure, DebugModeRefusesAReleaseTooMany) {
  runRanks(setup(true), [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().wait(graph->allgatherParam(1, std::nullopt), 1);
    graph->gatherer().release(1, 1);
    EXPECT_HAS(errorOf([&] { graph->gatherer().release(1, 1); }),
               "is not gathered by this graph, or was released by all its users");
  });
}

TEST_P(Z3Failure, DebugModeRefusesAReductionWithoutAGather) {
  runRanks(setup(true), [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().wait(graph->allgatherParam(1, std::nullopt), 1);
    graph->startBackward(true);
    EXPECT_EQ(errorOf([&] { graph->reduceGrad(at::ones({6}), 1); }), "");
    EXPECT_HAS(errorOf([&] { graph->reduceGrad(at::ones({6}), 1); }),
               "more reductions than gathers of parameter 'layer1'");
    graph->endBackward();
  });
}

TEST_P(Z3Failure, AfterAFailedGatherLaterGathersFailWithTheFirstError) {
  World world(setup(false));
  world.gathers->failAt(1, 1);
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    hurry(rank);
    const at::Tensor first = graph->allgatherParam(1, std::nullopt);
    const at::Tensor second = graph->allgatherParam(2, std::nullopt);
    EXPECT_HAS(errorOf([&] { graph->gatherer().wait(second, 2); }), "gathering parameter 'layer1'");
  });
}

TEST_P(Z3Failure, AFailedGatherIsHeardOfAtTheEndOfTheBackwardAlsoWhenNobodyWaitedForIt) {
  World world(setup(false));
  world.gathers->failAt(0, 1);
  world.gathers->failAt(1, 1);
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().prefetch({1, 2}, std::nullopt);
    graph->startBackward(true);
    EXPECT_HAS(errorOf([&] { graph->endBackward(); }), "gathering parameters 1, 2 (graph 4)");
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Z3Failure, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

// Memory that a gather in flight still writes to is neither freed nor handed to anyone who does not wait for it.
TEST(Z3WithWorkers, AParameterMayBeReleasedWhileItsGatherIsInFlight) {
  GroupSetup setup{2, CpuStreamMode::Worker, 16, testing::configOfTests()};
  World world(setup);
  runRanks(world, [&](Rank& rank) {
    rank.addSharded(1, at::ones({1 << 16}));
    rank.addSharded(2, at::full({10}, 2.0));
    const auto graph = rank.graph<Z3CustomOpExecutor>(4, {1, 2});
    rank.agree();
    rank.reduce_comm->barrier();
    world.gathers->close();
    rank.reduce_comm->barrier();
    graph->allgatherParam(1, std::nullopt);
    graph->gatherer().release(1, 1);
    const at::Tensor other = graph->allgatherParam(2, std::nullopt);  // another size: idle memory must make room
    world.gathers->open();
    graph->gatherer().wait(other, 2);
    EXPECT_TRUE(at::equal(other, at::full({10}, 2.0)));
    const at::Tensor again = graph->allgatherParam(1, std::nullopt);
    graph->gatherer().wait(again, 1);
    EXPECT_TRUE(at::equal(again, at::ones({1 << 16})));
  });
}

}  // namespace
}  // namespace dc
