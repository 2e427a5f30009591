#include "deepcompile/plan/strategies/on_demand.h"

#include "deepcompile/plan/strategies/offload_states.h"

namespace dc::plan {

Plan OnDemand::plan(const Problem& problem) const {
  Schedule schedule;
  // Gradients go out node by node; the next one waits for the last (two buffers).
  schedule.reductions = bucketReductions(problem, 1, 1);
  schedule.residencies = refreshAfterUpdate(problem, 1);
  const auto slots = static_cast<Index>(problem.graph.nodes.size());
  Index group = 0;
  for (Index slot = 0; slot < slots && problem.graph.stage == 3; ++slot) {
    for (const Index param : problem.usage.needs[slot]) {
      Residency residency{param, slot, slot, slot, group, {Why::OnDemand}, {Why::LastUse}};
      residency.release_reason.a = problem.graph.params[param].bytes;
      schedule.residencies.push_back(residency);
    }
    group += problem.usage.needs[slot].empty() ? 0 : 1;
  }
  keepPersistent(problem, schedule);
  offloadStatesToFit(problem, schedule, problem.budget, name());
  return emit(problem, schedule, name());
}

}  // namespace dc::plan
