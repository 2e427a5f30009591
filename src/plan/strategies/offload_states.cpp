#include "deepcompile/plan/strategies/offload_states.h"

#include <algorithm>

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

void keepPersistent(const Problem& problem, Schedule& schedule) {
  if (problem.graph.stage < 3) {
    return;
  }
  std::vector<Index> first(problem.graph.params.size(), kNone);
  std::vector<Residency> kept;
  for (const Residency& residency : schedule.residencies) {
    if (!problem.graph.params[residency.param].persistent) {
      kept.push_back(residency);
    } else if (first[residency.param] == kNone) {
      first[residency.param] = static_cast<Index>(kept.size());
      kept.push_back(residency);
      kept.back().last = problem.usage.uses[residency.param].back();
    }
  }
  schedule.residencies = std::move(kept);
}

MemoryTree memoryOf(const Problem& problem, const Schedule& schedule) {
  MemoryTree memory(problem.usage.live);
  holdGradients(problem, schedule.reductions, memory);
  if (problem.graph.stage == 3) {
    for (const Residency& residency : schedule.residencies) {
      memory.add(residency.launch, residency.last, problem.graph.params[residency.param].bytes);
    }
  }
  return memory;
}

void offloadStatesToFit(const Problem& problem, Schedule& schedule, Bytes limit, std::string_view strategy) {
  MemoryTree memory = memoryOf(problem, schedule);
  const auto slots = static_cast<Index>(problem.graph.nodes.size());
  const Index last = problem.cost.machine().offload != Offload::Nothing ? slots : 0;
  for (Index slot = 0; slot < last && !memory.within(0, slots - 1, limit); ++slot) {
    for (const Index param : problem.graph.nodes[slot].updates) {
      const Bytes state = problem.graph.params[param].state;
      if (state == 0) {
        continue;
      }
      Move move;
      move.item = {ItemKind::State, param};
      move.reload = slot;
      move.need = slot;
      move.offload = slot + 1;
      move.offloaded = std::min(slot + 2, slots);
      move.reason = {Why::OverBudget, state, 0};
      schedule.moves.push_back(move);
      memory.add(0, slot - 1, -state);
      memory.add(move.offloaded, slots - 1, -state);
    }
  }
  const Bytes peak = memory.max(0, slots - 1);
  if (peak > problem.budget) {
    const Index at = memory.firstAbove(0, slots - 1, peak - 1);
    throw BudgetError(
        concat("a budget of ", problem.budget, " bytes is too small for ", strategy, ": at least ", peak,
               " bytes are needed, at node '", problem.graph.nodes[at].name, "' (", problem.usage.live[at],
               " held whatever is gathered, ", problem.usage.gathered[at], " of gathered parameters that it uses)"),
        peak);
  }
}

}  // namespace dc::plan
