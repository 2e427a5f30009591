// What the ZeRO-3 executor does where it follows a plan (follower_test.cpp: what the plan says).
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/z3_executor.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::close;
using testing::errorsOfRanks;
using testing::gradientOf;
using testing::GroupSetup;
using testing::meanGradient;
using testing::Rank;
using testing::runRanks;
using testing::World;

at::Tensor valuesOf(std::int64_t id) { return at::arange(6, at::kFloat) + 10.0 * static_cast<double>(id); }
const std::vector<std::int64_t> kIds = {1, 2, 3};

CopyKey key(std::int64_t id) { return {id, at::kFloat}; }
ProgramEvent access(std::int64_t id, bool backward) { return {key(id), ProgramEvent::Kind::Read, backward}; }

// 1 and 2 are gathered together; 2 stays from forward to backward.
std::shared_ptr<ScheduleFollower> followerOf(std::vector<std::string>& agreed) {
  StepSchedule variant = {{access(1, false), false, {{key(1), key(2)}}},
                          {access(2, false), true, {}},
                          {access(2, true), false, {{key(1)}}},
                          {access(1, true), false, {}}};
  return std::make_shared<ScheduleFollower>(
      std::vector<StepSchedule>{variant}, std::unordered_set<std::int64_t>{}, std::unordered_set<std::int64_t>{},
      [&agreed](const std::string& text) { agreed.push_back(text); }, [](std::int64_t id) { return concat("w", id); });
}

std::shared_ptr<Z3CustomOpExecutor> graphOf(Rank& rank) {
  for (const std::int64_t id : kIds) {
    rank.addSharded(id, valuesOf(id));
  }
  auto graph = rank.graph<Z3CustomOpExecutor>(1, kIds);
  rank.agree();
  return graph;
}

class Z3Replay : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup() const { return {2, GetParam(), 8, testing::configOfTests()}; }
};

void readForward(Z3CustomOpExecutor& graph, std::int64_t id) {
  EXPECT_TRUE(at::equal(graph.gatherer().read(id, std::nullopt, false), valuesOf(id)));
}

void readBackward(Z3CustomOpExecutor& graph, const Rank& rank, std::int64_t id) {
  const auto version = DSParamRegistry::versionOf(rank.registry->getParam(id).getDSTensor());
  EXPECT_TRUE(
      at::equal(graph.gatherer().readAgain({1, id, at::kFloat, version, rank.context->generation}), valuesOf(id)));
}

TEST_P(Z3Replay, GathersAreFusedAndWhatThePlanKeepsIsNotGatheredAgain) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    std::vector<std::string> agreed;
    graph->gatherer().follow(followerOf(agreed));
    readForward(*graph, 1);
    EXPECT_GT(rank.pool->live(), 0);  // 2 is there ahead of its use
    readForward(*graph, 2);
    readBackward(*graph, rank, 2);
    readBackward(*graph, rank, 1);
    graph->gatherer().endCycle();
    EXPECT_EQ(rank.context->stats.gathers_launched.load(), 3);  // 1, 2, and 1 again
    EXPECT_EQ(rank.context->stats.gathers_fused.load(), 2);
    EXPECT_EQ(rank.pool->live(), 0);
    EXPECT_TRUE(agreed.empty());
    EXPECT_EQ(graph->gatherer().follower()->cycles(), 1);
  });
}

TEST_P(Z3Replay, WhatWasGatheredForNothingGoesBackToThePool) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    std::vector<std::string> agreed;
    graph->gatherer().follow(followerOf(agreed));
    readForward(*graph, 1);
    readForward(*graph, 3);  // not planned: gathered on demand
    readBackward(*graph, rank, 1);
    graph->gatherer().endCycle();
    EXPECT_EQ(rank.pool->live(), 0);
    EXPECT_EQ(graph->gatherer().follower()->divergences(), 1);
    EXPECT_EQ(graph->gatherer().follower()->dropped(), 1);
    EXPECT_EQ(agreed.size(), 2U);
    graph->gatherer().follow(nullptr);
    readForward(*graph, 2);
    EXPECT_EQ(agreed.size(), 2U);  // nobody follows any more
  });
}

TEST_P(Z3Replay, ATensorThatTheProgramHoldsOutlivesItsDrop) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    std::vector<std::string> agreed;
    graph->gatherer().follow(followerOf(agreed));
    readForward(*graph, 1);
    const at::Tensor held = graph->gatherer().read(2, std::nullopt, false);
    graph->gatherer().follow(nullptr);  // given up in the middle
    EXPECT_TRUE(at::equal(held, valuesOf(2)));
  });
}

// A compiled graph of two parameters, by number: both are gathered at its beginning, 1 stays from its first read to its
// second.
std::shared_ptr<const StepSchedule> graphSchedule() {
  const ProgramEvent begins{{}, ProgramEvent::Kind::BeginGraph, false};
  return std::make_shared<const StepSchedule>(StepSchedule{{begins, false, {{key(0), key(1)}}},
                                                           {access(1, false), true},
                                                           {access(0, false), false},
                                                           {access(1, false), false}});
}

void readCompiled(Z3CustomOpExecutor& graph, std::int64_t id) {
  EXPECT_TRUE(at::equal(graph.gatherer().read(id, std::nullopt, false, false, /*traced=*/true), valuesOf(id)));
}

TEST_P(Z3Replay, ACompiledGraphRunsByItsScheduleWhicheverParametersItIsCalledWith) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const auto& stats = rank.context->stats;
    std::int64_t gathered = 0;
    for (const std::vector<std::int64_t>& params : {std::vector<std::int64_t>{1, 2}, {2, 3}}) {
      graph->gatherer().beginGraph(graphSchedule(), params, nullptr);
      EXPECT_EQ(stats.gathers_fused.load(), gathered += 2);  // at its beginning
      readCompiled(*graph, params[1]);
      readForward(*graph, 1);  // the program's own read between has nothing to do with it
      readCompiled(*graph, params[0]);
      EXPECT_GT(rank.pool->live(), 0);
      readCompiled(*graph, params[1]);
      EXPECT_EQ(rank.pool->live(), 0);
      readCompiled(*graph, 3);  // behind its end: on demand
    }
  });
}

TEST_P(Z3Replay, ACompiledGraphThatReadsAnotherParameterThanItsScheduleIsAnErrorThatNamesBoth) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().beginGraph(graphSchedule(), {1, 2}, nullptr);
    const std::string error = testing::errorOf([&] { readCompiled(*graph, 3); });
    EXPECT_HAS(error, "reads parameter (id 3");
    EXPECT_HAS(error, "where its schedule has parameter (id 2");
    readCompiled(*graph, 3);  // the rest on demand
    graph->gatherer().beginGraph(nullptr, {}, nullptr);
    readCompiled(*graph, 1);
  });
}

TEST_P(Z3Replay, WhereTheWholeStepIsFollowedAGraphsOwnScheduleIsNot) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    std::vector<std::string> agreed;
    graph->gatherer().follow(followerOf(agreed));
    graph->gatherer().beginGraph(graphSchedule(), {2, 3}, nullptr);
    EXPECT_EQ(rank.context->stats.gathers_launched.load(), 0);
    readCompiled(*graph, 1);
    EXPECT_EQ(rank.context->stats.gathers_launched.load(), 2);
    graph->gatherer().follow(nullptr);
  });
}

INSTANTIATE_TEST_SUITE_P(Streams, Z3Replay, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
