#include "deepcompile/plan/strategies/per_block.h"

#include <algorithm>

#include "deepcompile/plan/strategies/offload_states.h"
#include "deepcompile/plan/strategies/on_demand.h"

namespace dc::plan {
namespace {

// Consecutive nodes of one block in one pass.
std::vector<Index> runStarts(const StepGraph& graph) {
  std::vector<Index> starts;
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const Node* before = n == 0 ? nullptr : &graph.nodes[n - 1];
    if (before == nullptr || node.block != before->block || node.phase != before->phase ||
        node.micro != before->micro) {
      starts.push_back(static_cast<Index>(n));
    }
  }
  starts.push_back(static_cast<Index>(graph.nodes.size()));
  return starts;
}

Schedule build(const Problem& problem, bool prefetch) {
  Schedule schedule;
  const StepGraph& graph = problem.graph;
  const std::vector<Index> starts = runStarts(graph);
  schedule.residencies = refreshAfterUpdate(problem, problem.cost.saturatingGather());
  Index group = 0;
  std::vector<Index> seen(graph.params.size(), kNone);
  std::vector<Index> place(graph.params.size(), kNone);
  for (std::size_t run = 0; run + 1 < starts.size() && graph.stage == 3; ++run) {
    const Index launch = prefetch && run > 0 ? starts[run - 1] : starts[run];
    for (Index slot = starts[run]; slot < starts[run + 1]; ++slot) {
      for (const Index param : problem.usage.needs[slot]) {
        if (seen[param] == static_cast<Index>(run)) {
          schedule.residencies[place[param]].last = slot;
          continue;
        }
        seen[param] = static_cast<Index>(run);
        place[param] = static_cast<Index>(schedule.residencies.size());
        schedule.residencies.push_back(
            {param, launch, slot, slot, group, {prefetch ? Why::NextBlock : Why::OnDemand}, {Why::LastUse}});
        schedule.residencies.back().release_reason.a = graph.params[param].bytes;
      }
    }
    ++group;
  }
  // A parameter that the block before still holds is not gathered again: its residency goes on.
  if (graph.stage == 3) {
    std::vector<Index> last(graph.params.size(), kNone);
    std::vector<Residency> merged;
    for (const Residency& residency : schedule.residencies) {
      const Index before = last[residency.param];
      if (before != kNone && merged[before].last >= residency.launch) {
        merged[before].last = std::max(merged[before].last, residency.last);
      } else {
        last[residency.param] = static_cast<Index>(merged.size());
        merged.push_back(residency);
      }
    }
    schedule.residencies = std::move(merged);
  }
  // One bucket per block, waited for at the end of the next block.
  schedule.reductions = bucketReductions(problem, problem.cost.saturatingReduce(), 2);
  keepPersistent(problem, schedule);
  return schedule;
}

}  // namespace

Plan PerBlock::plan(const Problem& problem) const {
  for (const bool prefetch : {true, false}) {
    try {
      Schedule schedule = build(problem, prefetch);
      offloadStatesToFit(problem, schedule, problem.budget, name());
      return emit(problem, schedule, name());
    } catch (const BudgetError&) {
      // Less memory: a block's parameters at its own start, then each node's.
    }
  }
  Plan plan = OnDemand().plan(problem);
  plan.strategy = name();
  return plan;
}

}  // namespace dc::plan
