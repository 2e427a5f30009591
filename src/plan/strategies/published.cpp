#include "deepcompile/plan/strategies/published.h"

#include <algorithm>

#include "deepcompile/plan/strategies/offload_states.h"
#include "deepcompile/plan/strategies/on_demand.h"

namespace dc::plan {
namespace {

constexpr Bytes kMostPending = 4000000000;
constexpr Bytes kMostFused = 1000000000;
constexpr Bytes kReduceBucket = 500000000;

// One residency for each parameter in each graph (a pass of a micro-batch), gathered right before
// its first use there.
std::vector<Residency> perGraph(const Problem& problem) {
  const StepGraph& graph = problem.graph;
  std::vector<Residency> residencies;
  std::vector<Index> open(graph.params.size(), kNone);
  std::vector<Index> open_graph(graph.params.size(), kNone);
  Index pass = 0;
  const auto slots = static_cast<Index>(graph.nodes.size());
  for (Index slot = 0; slot < slots; ++slot) {
    const Node& node = graph.nodes[slot];
    if (slot > 0 && (node.phase != graph.nodes[slot - 1].phase || node.micro != graph.nodes[slot - 1].micro)) {
      ++pass;
    }
    for (const Index param : problem.usage.needs[slot]) {
      if (open_graph[param] == pass) {
        residencies[open[param]].last = slot;
        continue;
      }
      open_graph[param] = pass;
      open[param] = static_cast<Index>(residencies.size());
      residencies.push_back({param, slot, slot, slot, kNone, {Why::Hoisted}, {Why::LastUse}});
      residencies.back().release_reason.a = graph.params[param].bytes;
    }
  }
  return residencies;
}

// Gathers that were flushed together, in order of use; neighbours are fused when it pays.
void place(const Problem& problem, std::vector<Residency>& residencies, std::vector<Index>& pending, Index at,
           Bytes pending_bytes, Index& group) {
  std::reverse(pending.begin(), pending.end());
  Bytes bytes = 0;
  Nanos longest = 0;
  for (const Index i : pending) {
    const Bytes size = problem.graph.params[residencies[i].param].bytes;
    const Nanos alone = problem.cost.gather(size);
    const bool fuse = bytes > 0 && bytes + size < kMostFused &&
                      12 * std::max(longest, alone) > 10 * problem.cost.gather(bytes + size);
    if (!fuse) {
      ++group;
      bytes = 0;
      longest = 0;
    }
    bytes += size;
    longest = problem.cost.gather(bytes);
    residencies[i].launch = at;
    residencies[i].group = group;
    residencies[i].reason.a = pending_bytes;
  }
  pending.clear();
}

void hoist(const Problem& problem, Schedule& schedule, Bytes limit) {
  const StepGraph& graph = problem.graph;
  MemoryTree memory = memoryOf(problem, schedule);
  std::vector<Residency>& residencies = schedule.residencies;
  std::vector<Index> pending;
  Bytes pending_bytes = 0;
  Index group = kNone;
  auto next = static_cast<Index>(residencies.size()) - 1;
  for (auto slot = static_cast<Index>(graph.nodes.size()) - 1; slot >= 0; --slot) {
    const Node& node = graph.nodes[slot];
    // What is pending would be held here too, were it hoisted above this node.
    if (!pending.empty() && (!memory.within(slot, slot, limit - pending_bytes) || pending_bytes > kMostPending)) {
      place(problem, residencies, pending, slot + 1, pending_bytes, group);
      pending_bytes = 0;
    }
    while (next >= 0 && residencies[next].first == slot) {
      pending.push_back(next);
      pending_bytes += graph.params[residencies[next].param].bytes;
      --next;
    }
    const bool graph_begins =
        slot == 0 || node.phase != graph.nodes[slot - 1].phase || node.micro != graph.nodes[slot - 1].micro;
    if (graph_begins) {
      place(problem, residencies, pending, slot, pending_bytes, group);
      pending_bytes = 0;
    }
  }
}

// Parameters that stay gathered for the whole step, by isolated gather time per byte; stops at the
// first that does not fit.
void unshard(const Problem& problem, Schedule& schedule, Bytes limit) {
  const StepGraph& graph = problem.graph;
  std::vector<Index> order;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    if (problem.usage.uses[p].size() > 1 && !graph.params[p].persistent && graph.params[p].bytes > 0) {
      order.push_back(static_cast<Index>(p));
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) {
    const Bytes x = graph.params[a].bytes;
    const Bytes y = graph.params[b].bytes;
    return static_cast<Wide>(problem.cost.gather(x)) * y > static_cast<Wide>(problem.cost.gather(y)) * x;
  });
  const auto slots = static_cast<Index>(graph.nodes.size());
  Bytes room = limit - memoryOf(problem, schedule).max(0, slots - 1);
  std::vector<char> kept(graph.params.size(), 0);
  for (const Index param : order) {
    if (graph.params[param].bytes > room) {
      break;
    }
    room -= graph.params[param].bytes;
    kept[param] = 1;
  }
  std::vector<char> seen(graph.params.size(), 0);
  std::erase_if(schedule.residencies, [&](Residency& residency) {
    if (kept[residency.param] == 0) {
      return false;
    }
    residency.last = problem.usage.uses[residency.param].back();
    residency.reason = {Why::Kept, graph.params[residency.param].bytes, 0};
    return seen[residency.param]++ != 0;
  });
}

}  // namespace

Plan Published::plan(const Problem& problem) const {
  Schedule schedule;
  const Bytes bucket = std::min(kReduceBucket, problem.budget / 64);
  schedule.reductions = bucketReductions(problem, bucket, 2);
  if (problem.graph.stage < 3) {
    schedule.residencies = refreshAfterUpdate(problem, bucket);
    offloadStatesToFit(problem, schedule, problem.budget, name());
    return emit(problem, schedule, name());
  }
  schedule.residencies = perGraph(problem);
  keepPersistent(problem, schedule);
  const Bytes limit = mulDiv(problem.budget, 9, 10);
  const auto slots = static_cast<Index>(problem.graph.nodes.size());
  try {
    if (memoryOf(problem, schedule).max(0, slots - 1) > limit) {
      // Offloading replaces prefetching.
      for (std::size_t i = 0; i < schedule.residencies.size(); ++i) {
        schedule.residencies[i].group = static_cast<Index>(i);
        schedule.residencies[i].reason = {Why::OnDemand};
      }
      offloadStatesToFit(problem, schedule, mulDiv(problem.budget, 8, 10), name());
      return emit(problem, schedule, name());
    }
    hoist(problem, schedule, limit);
    unshard(problem, schedule, limit);
    offloadStatesToFit(problem, schedule, problem.budget, name());
    return emit(problem, schedule, name());
  } catch (const BudgetError&) {
    Plan plan = OnDemand().plan(problem);
    plan.strategy = name();
    return plan;
  }
}

}  // namespace dc::plan
