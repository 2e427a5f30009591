// Backwards without an update between them.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/executor.h"

#include "support/whole_params.h"

namespace dc {
namespace {

using testing::awkwardParams;
using testing::expectMeans;
using testing::gradientOf;
using testing::graphOf;
using testing::GroupSetup;
using testing::plainParams;
using testing::Rank;
using testing::runBackward;
using testing::runRanks;
using testing::World;

class Accumulation : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(int ranks, std::int64_t bucket_size = 64) const {
    return {ranks, GetParam(), bucket_size, testing::configOfTests()};
  }
};

template <typename Executor>
void accumulateAndUpdateTwice(const GroupSetup& setup, const std::vector<testing::Whole>& params) {
  runRanks(setup, [&](Rank& rank) {
    const auto graph = graphOf<Executor>(rank, params);
    runBackward(*graph, rank, params, false, 0);
    runBackward(*graph, rank, params, false, 1);
    runBackward(*graph, rank, params, true, 2);
    expectMeans(rank, params, {0, 1, 2});
    runBackward(*graph, rank, params, false, 3);  // the first after an update overwrites
    runBackward(*graph, rank, params, true, 4);
    expectMeans(rank, params, {3, 4});
    runBackward(*graph, rank, params, true, 5);
    expectMeans(rank, params, {5});
  });
}

TEST_P(Accumulation, AddsUpFromOneUpdateToTheNextInZero1) {
  for (const int bucket_size : {10, 64}) {
    accumulateAndUpdateTwice<Z1CustomOpExecutor>(setup(3, bucket_size), awkwardParams());
  }
}

TEST_P(Accumulation, AddsUpFromOneUpdateToTheNextInZero2) {
  for (const int bucket_size : {10, 64}) {
    accumulateAndUpdateTwice<Z2CustomOpExecutor>(setup(3, bucket_size), awkwardParams());
  }
}

TEST_P(Accumulation, AddsUpFromOneUpdateToTheNextAtOneRank) {
  const std::vector<testing::Whole> params = {{1, 4, {{0, 4}}}, {2, 3, {{0, 3}}}};
  accumulateAndUpdateTwice<Z1CustomOpExecutor>(setup(1), params);
  accumulateAndUpdateTwice<Z2CustomOpExecutor>(setup(1), params);
}

TEST_P(Accumulation, ZeRO2ReducesInEveryBackwardAndEachSeesTheSumSoFar) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams(), false, 0);
    expectMeans(rank, plainParams(), {0});
    runBackward(*graph, rank, plainParams(), true, 1);
    expectMeans(rank, plainParams(), {0, 1});
  });
}

TEST_P(Accumulation, ASumThatABucketDtypeWouldLoseIsKeptInTheDtypeOfTheBuffer) {
  runRanks(setup(2), [](Rank& rank) {
    rank.addWhole(1, {4}, rank.rank() == 0 ? Slice{0, 4} : Slice{0, 0}).setReduceDtype(at::kBFloat16);
    const auto graph = rank.graph<Z2CustomOpExecutor>(1, {1});
    rank.agree();
    for (const double value : {256.0, 1.0}) {
      graph->startBackward(value == 1.0);
      graph->reduceGrad(at::full({4}, value), 1);
      graph->endBackward();
    }
    EXPECT_TRUE(at::all(rank.gradient(1) == 257).item<bool>());
  });
}

TEST_P(Accumulation, AParameterWithoutAGradientInTheLastBackwardKeepsWhatItHas) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf<Z2CustomOpExecutor>(rank, plainParams());
    runBackward(*graph, rank, plainParams(), false, 0);
    graph->startBackward(true);
    graph->reduceGrad(gradientOf(rank.rank(), 3, 4, 1), 3);
    graph->endBackward();
    expectMeans(rank, {plainParams()[2]}, {0, 1});
    expectMeans(rank, {plainParams()[0], plainParams()[1]}, {0});
  });
}

TEST_P(Accumulation, GraphsOfOneRuntimeAgreeOnWhenABackwardIsTheFirstAfterAnUpdate) {
  runRanks(setup(2), [](Rank& rank) {
    testing::addAll(rank, plainParams());
    const auto first = rank.graph<Z2CustomOpExecutor>(1, {1, 2});
    const auto second = rank.graph<Z2CustomOpExecutor>(2, {2, 3});
    rank.agree();
    for (const int step : {0, 10}) {
      for (int micro = 0; micro < 2; ++micro) {
        first->startBackward(micro == 1);
        second->startBackward(micro == 1);
        for (auto* graph : {first.get(), second.get()}) {
          for (const int id : graph->getIds()) {
            graph->reduceGrad(gradientOf(rank.rank(), id, plainParams()[id - 1].numel, step + micro), id);
          }
          graph->endBackward();
        }
      }
      expectMeans(rank, {plainParams()[0], plainParams()[2]}, {step, step + 1});
      expectMeans(rank, {plainParams()[1]}, {step, step + 1, step, step + 1});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Accumulation, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
