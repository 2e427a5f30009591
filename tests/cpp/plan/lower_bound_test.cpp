// The lower bound must hold for every plan. Here the host link is about as fast as the collectives, so
// that offloading matters and what the bound says about it is put to the test.
#include "deepcompile/plan/lower_bound.h"

#include <algorithm>
#include <cstdio>
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/text.h"
#include "deepcompile/plan/verifier.h"

#include "random_step.h"

namespace dc::plan {
namespace {

Nanos boundOf(const std::string& graph_text, const std::string& machine_text, Bytes budget) {
  const StepGraph graph = parseGraph(graph_text);
  return lowerBound(graph, Usage(graph), CostModel(parseMachine(machine_text), graph.world), budget).best;
}

constexpr const char* kLinks =
    "machine m\ndevices 2\nshared_links no\ninside latency=0us bandwidth=500MB\nto_device latency=0us bandwidth=1MB\n"
    "to_host latency=0us bandwidth=1MB\n";

TEST(LowerBound, NoPlanOfAnyStrategyBeatsIt) {
  std::mt19937 random(7);
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  double nearest = 1e9;
  int offloading = 0;
  for (int i = 0; i < 300; ++i) {
    const StepGraph graph = randomStep(random, i % 4 == 0 ? 2 : 3);
    const Usage usage(graph);
    const Machine machine = parseMachine(
        concat("machine m\ndevices 4\nshared_links ", i % 2 == 0 ? "yes" : "no", "\ninside latency=", pick(0, 3),
               "us bandwidth=", pick(20, 400), "MB\nto_device latency=1us bandwidth=", pick(10, 300),
               "MB\nto_host latency=1us bandwidth=", pick(10, 300), "MB\nslowdown ", pick(0, 300), "\n"));
    const CostModel cost(machine, graph.world);
    const auto budget = static_cast<Bytes>(usage.resident * pick(70, 160) / 100);
    const Nanos bound = lowerBound(graph, usage, cost, budget).best;
    for (const std::string_view name : {"planned", "published", "per_block", "on_demand"}) {
      try {
        const Plan plan = makeStrategy(name)->plan({graph, usage, cost, budget});
        ASSERT_FALSE(verify(graph, plan).has_value());
        const Nanos step = simulate(graph, cost, plan).step;
        ASSERT_LE(bound, step) << name << "\n" << print(graph) << print(machine) << "budget " << budget;
        nearest = std::min(nearest, static_cast<double>(step) / static_cast<double>(bound));
        offloading +=
            std::ranges::any_of(plan.instructions, [](const Instruction& in) { return in.kind == NodeKind::Offload; });
      } catch (const BudgetError&) {
        // Some of the budgets are too small for some of the strategies.
      }
    }
  }
  std::printf("nearest to the bound: %.4f; %d plans offload\n", nearest, offloading);
  EXPECT_GT(offloading, 100);
}

// Forward gathers a and b (2 us each); the node at the turn needs all memory, so b, used again right after
// it, is gathered once more after it, however idle the links are beside it.
TEST(LowerBound, WhatDoesNotFitBesideTheTurnIsGatheredAfterIt) {
  const auto graph = [](const std::string& workspace) {
    return "graph g\nworld 2\nparam a bytes=1000 shard=0 accum=0 grad=0\nparam b bytes=1000 shard=0 accum=0 grad=0\n"
           "node fb compute time=1us uses=b\nnode fa compute time=1us uses=a\n"
           "node ba compute time=10us phase=backward uses=a grads=a workspace=" +
           workspace + "\nnode bb compute time=1us phase=backward uses=b grads=b\n";
  };
  EXPECT_EQ(boundOf(graph("1000B"), kLinks, 2000), 1000 + 1000 + 1000 + 10000 + 1000 + 1000);
  EXPECT_EQ(boundOf(graph("0B"), kLinks, 2000), 1000 + 1000 + 1000 + 10000 + 1000);
}

// The gradient that the last node completes must be reduced before its update, and all updates follow.
TEST(LowerBound, UpdatesFollowTheLastReduction) {
  EXPECT_EQ(boundOf("graph g\nworld 2\nparam a bytes=1000 shard=0 accum=0\nparam b bytes=10 shard=0 accum=0 grad=0\n"
                    "node f compute time=1us uses=a\nnode b compute time=1us phase=backward uses=a grads=a,b\n"
                    "node u optimizer time=3us updates=a\nnode v optimizer time=5us updates=b\n",
                    kLinks, 100000),
            1000 + 1000 + 1000 + 1000 + 3000 + 5000);
}

}  // namespace
}  // namespace dc::plan
