#include "deepcompile/runtime/z1_executor.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/whole_params.h"

namespace dc {
namespace {

using testing::close;
using testing::expectMeans;
using testing::gradientOf;
using testing::graphOf;
using testing::GroupSetup;
using testing::plainParams;
using testing::Rank;
using testing::runBackward;
using testing::runRanks;
using testing::sliceOf;
using testing::Whole;
using testing::World;

class Z1 : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(int ranks = 2) const { return {ranks, GetParam(), 64, testing::configOfTests()}; }
};

TEST_P(Z1, CommunicatesOnlyInTheBackwardBeforeAnUpdate) {
  World world(setup());
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams(), false, 0);
    runBackward(*graph, rank, plainParams(), false, 1);
    EXPECT_EQ(rank.context->traffic->calls(Collective::ReduceScatter), 0);
    EXPECT_TRUE(close(rank.gradient(2), at::zeros_like(rank.gradient(2))));
    runBackward(*graph, rank, plainParams(), true, 2);
    EXPECT_EQ(rank.context->traffic->calls(Collective::ReduceScatter), 1);
    expectMeans(rank, plainParams(), {0, 1, 2});
  });
}

TEST_P(Z1, WhatWasKeptTravelsAlsoWhenTheLastBackwardHasNoGradient) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams(), false, 0);
    graph->startBackward(true);
    graph->endBackward();
    expectMeans(rank, plainParams(), {0});
    EXPECT_TRUE(graph->reducer().withoutGradient().ids().empty());
    runBackward(*graph, rank, plainParams(), true, 1);
    expectMeans(rank, plainParams(), {1});
  });
}

TEST_P(Z1, WhatWasKeptArrivesAlsoAtOneRankWhenTheLastBackwardHasNoGradient) {
  const std::vector<Whole> params = {{1, 4, {{0, 4}}}};
  runRanks(setup(1), [&](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, params);
    runBackward(*graph, rank, params, false, 0);
    graph->startBackward(true);
    graph->endBackward();
    expectMeans(rank, params, {0});
    runBackward(*graph, rank, params, true, 1);
    expectMeans(rank, params, {1});
  });
}

TEST_P(Z1, SeveralGradientsOfOneParameterAddUpInEveryBackward) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, plainParams());
    for (const int backward : {0, 1}) {
      graph->startBackward(backward == 1);
      for (int repeat = 0; repeat < 2; ++repeat) {
        for (const Whole& param : plainParams()) {
          graph->reduceGrad(gradientOf(rank.rank(), param.id, param.numel, 2 * backward + repeat), param.id);
        }
      }
      graph->endBackward();
    }
    expectMeans(rank, plainParams(), {0, 1, 2, 3});
  });
}

TEST_P(Z1, AGradientThatOnlyOneRankKeptCountsForAll) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, plainParams());
    graph->startBackward(false);
    const Whole second = plainParams()[1];
    if (rank.rank() == 1) {
      graph->reduceGrad(gradientOf(1, 2, second.numel), 2);
    }
    graph->endBackward();
    graph->startBackward(true);
    graph->endBackward();
    EXPECT_TRUE(close(rank.gradient(2), sliceOf(second, rank, gradientOf(1, 2, second.numel) / 2)));
    EXPECT_EQ(graph->reducer().withoutGradient().ids(), (std::vector<std::int64_t>{1, 3}));
  });
}

TEST_P(Z1, KeepsTheSumInTheReductionDtype) {
  runRanks(setup(), [](Rank& rank) {
    rank.addWhole(1, {4}, rank.rank() == 0 ? Slice{0, 4} : Slice{0, 0});
    const auto graph = rank.graph<Z1CustomOpExecutor>(1, {1});
    rank.agree();
    for (const double value : {256.0, 1.0, 1.0}) {
      graph->startBackward(false);
      graph->reduceGrad(at::full({4}, value, at::kBFloat16), 1);
      graph->endBackward();
    }
    graph->startBackward(true);
    graph->endBackward();
    EXPECT_TRUE(at::all(rank.gradient(1) == 258).item<bool>());
  });
}

TEST_P(Z1, TheCallerKeepsItsGradient) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf<Z1CustomOpExecutor>(rank, plainParams());
    const at::Tensor gradient = gradientOf(rank.rank(), 1, 6);
    graph->startBackward(false);
    graph->reduceGrad(gradient, 1);
    graph->reduceGrad(gradient, 1);
    graph->endBackward();
    EXPECT_TRUE(at::equal(gradient, gradientOf(rank.rank(), 1, 6)));
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Z1, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
