#include "deepcompile/plan/lower_bound.h"

#include <algorithm>

#include "deepcompile/plan/window_bound.h"

namespace dc::plan {
namespace {

Bytes reducedBytes(const StepGraph& graph, const Usage& usage, Index from_slot) {
  Bytes bytes = 0;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    Index micro = kNone;
    for (const Index slot : usage.contributions[p]) {
      const bool counts = graph.stage == 1 ? micro == kNone : graph.nodes[slot].micro != micro;
      if (counts && slot >= from_slot) {
        bytes += graph.params[p].grad;
      }
      micro = graph.nodes[slot].micro;
    }
  }
  return bytes;
}

}  // namespace

LowerBound lowerBound(const StepGraph& graph, const Usage& usage, const CostModel& cost, Bytes budget) {
  LowerBound bound;
  const auto slots = static_cast<Index>(graph.nodes.size());
  Nanos compute = 0;
  for (const Node& node : graph.nodes) {
    compute += node.time;
  }
  bound.launches = cost.machine().launch * slots;
  bound.reductions = cost.leastReduce(reducedBytes(graph, usage, 0));
  Bytes refreshed = 0;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    refreshed += graph.stage < 3 && usage.update[p] != kNone ? graph.params[p].bytes : 0;
  }
  // All that the first k nodes use is gathered before the k-th; all that the last nodes contribute
  // is reduced after them.
  std::vector<char> seen(graph.params.size(), 0);
  Bytes before = 0;
  Nanos rest = compute;
  std::vector<Nanos> late(graph.nodes.size() + 1,
                          0);  // by how much the gathers delay this slot at least
  for (Index slot = 0; slot < slots; ++slot) {
    for (const Index param : usage.needs[slot]) {
      if (seen[param] == 0 && !graph.params[param].frozen) {
        before += graph.params[param].bytes;
      }
      seen[param] = 1;
    }
    const Nanos gathered = cost.leastGather(before);
    bound.critical = std::max(bound.critical, gathered + rest);
    late[slot] = std::max(slot == 0 ? 0 : late[slot - 1], gathered - (compute - rest));
    rest -= graph.nodes[slot].time;
  }
  Index last_contribution = kNone;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    if (!usage.contributions[p].empty()) {
      last_contribution = std::max(last_contribution, usage.contributions[p].back());
    }
  }
  if (graph.stage < 3) {
    // Whole parameters are refreshed after the first update at the earliest.
    Nanos done = 0;
    for (const Node& node : graph.nodes) {
      done += node.time;
      if (!node.updates.empty()) {
        bound.critical = std::max(bound.critical, done + cost.leastGather(refreshed));
        break;
      }
    }
  }
  if (last_contribution != kNone) {
    Nanos done = 0;
    for (Index slot = 0; slot <= last_contribution; ++slot) {
      done += graph.nodes[slot].time;
    }
    const Nanos last = cost.leastReduce(reducedBytes(graph, usage, last_contribution));
    const Nanos updates = reduceAndUpdate(graph, usage, cost, last_contribution, slots);
    bound.critical = std::max(bound.critical, late[last_contribution] + done + std::max(last, updates));
  }
  for (const bool turn : {false, true}) {
    const Nanos known = std::max({compute, bound.windows, bound.critical, bound.launches, bound.reductions});
    const Cut cut = windowsOf(graph, usage, cost, budget, turn);
    const WindowBound windows = windowBound(graph, cost, cut, bound.reductions, known);
    bound.windows = windows.step;
    bound.gathers = std::max(bound.gathers, windows.gathers + cost.leastGather(refreshed));
  }
  const bool shared = cost.machine().shared_links;
  bound.links = shared ? bound.gathers + bound.reductions : std::max(bound.gathers, bound.reductions);
  // While collectives run, compute runs slower: T >= compute + links * s / (1 + s).
  bound.compute = compute + mulDiv(bound.links, cost.machine().slowdown, 1000 + cost.machine().slowdown);
  bound.best = std::max(
      {bound.windows, bound.compute, bound.gathers, bound.reductions, bound.links, bound.critical, bound.launches});
  return bound;
}

}  // namespace dc::plan
