// What goes wrong says so: at the call where the mistake is the caller's, at the wait where it is in the asynchronous
// work.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/executor.h"

#include "support/whole_params.h"

namespace dc {
namespace {

using testing::errorOf;
using testing::errorsOfRanks;
using testing::gradientOf;
using testing::graphOf;
using testing::GroupSetup;
using testing::plainParams;
using testing::Rank;
using testing::runBackward;
using testing::runRanks;
using testing::World;

class ExecutorFailure : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(std::int64_t bucket_size = 64) const {
    return {2, GetParam(), bucket_size, testing::configOfTests()};
  }
};

// From now on a collective gives up soon.
void hurry(Rank& rank) { rank.reduce_comm->setTimeout(0.4); }

TEST_P(ExecutorFailure, AGradientOfTheWrongSizeIsRefusedWithBoth) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    EXPECT_EQ(
        errorOf([&] { graph->reduceGrad(at::ones({2, 2}), 1); }),
        concat("reduce_grad: parameter (id 1, shape [6], Float) got a gradient of shape [2, 2], which has 4 elements "
               "instead of 6 (rank ",
               rank.rank(), " of 2)"));
    EXPECT_FALSE(graph->reducer().open()) << "a refused gradient opens nothing";
  });
}

TEST_P(ExecutorFailure, AGradientOfIntegersIsRefused) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    EXPECT_HAS(errorOf([&] { graph->reduceGrad(at::ones({6}, at::kInt), 1); }), "a gradient of dtype Int");
  });
}

TEST_P(ExecutorFailure, AFrozenParameterTakesNoGradient) {
  runRanks(setup(), [](Rank& rank) {
    rank.registry->registerParam(1, {4}, at::zeros({4}), at::Tensor(), false, 0, false);
    rank.registry->getParam(1).setName("embedding");
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1});
    rank.agree();
    EXPECT_HAS(errorOf([&] { graph->reduceGrad(at::ones({4}), 1); }),
               "reduce_grad: parameter 'embedding' (id 1, shape [4], Float) is frozen");
    graph->startBackward(true);
    EXPECT_EQ(errorOf([&] { graph->endBackward(); }), "");
  });
}

TEST_P(ExecutorFailure, AParameterOfAnotherGraphOrOfNoneIsRefusedWithTheGraphsIds) {
  runRanks(setup(), [](Rank& rank) {
    testing::addAll(rank, plainParams());
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1, 2});
    rank.agree();
    EXPECT_EQ(errorOf([&] { graph->reduceGrad(at::ones({4}), 3); }),
              concat("parameter (id 3, shape [4], Float) does not belong to this graph, whose ids are [1, 2] (rank ",
                     rank.rank(), " of 2)"));
    EXPECT_HAS(errorOf([&] { graph->reduceGrad(at::ones({4}), 9); }), "parameter id 9 (not registered)");
  });
}

TEST_P(ExecutorFailure, AnErrorInAReductionSurfacesAtTheEndOfTheBackwardAndOnlyThere) {
  World world(setup(6));
  world.reductions->failAt(1, 1);  // the second of three buckets
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    hurry(rank);
    graph->startBackward(true);
    EXPECT_EQ(errorOf([&] { testing::giveGradients(*graph, rank, plainParams()); }), "");
    const std::string error = errorOf([&] { graph->endBackward(); });
    EXPECT_HAS(error,
               concat("reducing the gradients of 1 parameters (ids 2, Float) on rank ", rank.rank(), " of 2 failed: "));
    EXPECT_HAS(error, rank.rank() == 1 ? "rank 1 was told to fail in reduce_scatter" : "rank 0 waited too long");
    EXPECT_HAS(error, "`timeout` bounds the wait and `debug` names the ranks that differ");
    EXPECT_FALSE(graph->reducer().open());
  });
}

TEST_P(ExecutorFailure, AfterAFailedReductionEveryLaterBackwardRepeatsTheFirstError) {
  World world(setup());
  world.reductions->failAt(1, 0);
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    hurry(rank);
    std::vector<std::string> errors;
    for (int step = 0; step < 2; ++step) {
      errors.push_back(errorOf([&] { runBackward(*graph, rank, plainParams()); }));
    }
    EXPECT_NE(errors[0], "");
    EXPECT_EQ(errors[0], errors[1]);
  });
}

TEST_P(ExecutorFailure, ARankThatNeverComesIsADeadlineAndNotAHang) {
  World world(setup());
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    hurry(rank);
    if (rank.rank() == 0) {
      runBackward(*graph, rank, plainParams());
    }
  });
  EXPECT_HAS(errors[0],
             "reducing the gradients of 3 parameters (ids 3, 2, 1, Float) on rank 0 of 2 failed: rank 0 waited");
  EXPECT_EQ(errors[1], "");
}

TEST_P(ExecutorFailure, DebugModeNamesTheRanksThatReduceDifferentParameters) {
  GroupSetup with = setup();
  with.config.debug = true;
  World world(with);
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    testing::addAll(rank, plainParams());
    // Registered alike, but each rank ends the backward of another graph first.
    const auto first = rank.graph<Z2CustomOpExecutor>(1, {1, 2});
    const auto second = rank.graph<Z2CustomOpExecutor>(2, {3});
    rank.agree();
    (rank.rank() == 0 ? first : second)->startBackward(true);
    (rank.rank() == 0 ? first : second)->endBackward();
  });
  for (const std::string& error : errors) {
    EXPECT_HAS(error,
               "the ranks are about to run different collectives:\n  rank 1 has reduction of parameters 3\n"
               "  where rank 0 has reduction of parameters 2, 1");
  }
}

TEST_P(ExecutorFailure, WaitingAfterEachReductionFindsTheErrorAtTheGradientThatFilledTheBucket) {
  GroupSetup with = setup(6);
  with.config.sync_after_reduce = true;
  World world(with);
  world.reductions->failAt(1, 0);
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    hurry(rank);
    graph->startBackward(true);
    graph->reduceGrad(gradientOf(rank.rank(), 3, 4), 3);
    EXPECT_HAS(errorOf([&] { graph->reduceGrad(gradientOf(rank.rank(), 2, 10), 2); }), "(ids 3, Float)");
  });
}

TEST_P(ExecutorFailure, TheFirstStepMayTakeTenTimesAsLong) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    EXPECT_DOUBLE_EQ(rank.context->timeout(), 20);
    runBackward(*graph, rank, plainParams());
    EXPECT_DOUBLE_EQ(rank.context->timeout(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, ExecutorFailure, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

TEST(ExecutorWithWorkers, TheCallerOfAGradientDoesNotWaitForTheOtherRanks) {
  GroupSetup setup{2, CpuStreamMode::Worker, 6, testing::configOfTests()};
  World world(setup);
  runRanks(world, [&](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    if (rank.rank() == 0) {
      world.reductions->close();  // no reduction can begin
    }
    rank.gather_comm->barrier();
    graph->startBackward(true);
    testing::giveGradients(*graph, rank, plainParams());
    EXPECT_FALSE(rank.reduce_stream->record().passed());
    rank.gather_comm->barrier();
    world.reductions->open();
    graph->endBackward();
    testing::expectMeans(rank, plainParams());
  });
}

}  // namespace
}  // namespace dc
