#include "deepcompile/plan/prefetch_limit.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "deepcompile/plan/models.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

// How many nodes a gather starts before the first use of each of its parameters, at most.
Index furthestAhead(const StepGraph& graph, const Plan& plan) {
  Index furthest = 0;
  Index slot = 0;
  for (const Instruction& in : plan.instructions) {
    slot = in.node == kNone ? slot : in.node + 1;
    if (in.kind != NodeKind::Gather) {
      continue;
    }
    for (const Item& item : plan.itemsOf(in)) {
      Index use = slot;
      while (std::ranges::find(graph.nodes[use].uses, item.id) == graph.nodes[use].uses.end()) {
        ++use;
      }
      furthest = std::max(furthest, use - slot);
    }
  }
  return furthest;
}

TEST(PrefetchLimit, NoGatherStartsEarlierThanAllowedAndThePlanHolds) {
  const Machine machine = preset("2xcpu");
  ModelOptions options;
  options.world = 2;
  options.sequence = 64;
  const StepGraph graph = makeModel("tiny-llama", options, machine);
  const Usage usage(graph);
  const CostModel cost(machine, graph.world);
  for (const char* strategy : {"planned", "per_block", "published", "on_demand"}) {
    const Plan plan = makeStrategy(strategy)->plan({graph, usage, cost, machine.budget});
    for (const Index ahead : {0, 1, 3}) {
      const Plan limited = limitPrefetch(graph, plan, ahead);
      EXPECT_LE(furthestAhead(graph, limited), ahead) << strategy;
      const auto violation = verify(graph, limited);
      EXPECT_FALSE(violation.has_value()) << strategy << ", " << ahead << ": " << violation->reason;
    }
    const Index all = static_cast<Index>(graph.nodes.size());
    EXPECT_EQ(hashOf(limitPrefetch(graph, plan, all)), hashOf(plan)) << strategy << ": nothing to limit";
  }
}

}  // namespace
}  // namespace dc::plan
