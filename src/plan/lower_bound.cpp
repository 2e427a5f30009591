#include "deepcompile/plan/lower_bound.h"

#include <algorithm>

namespace dc::plan {
namespace {

// Staying gathered from slot `begin` to slot `end` (both inclusive, between two uses) saves one
// gather of `bytes`.
struct Gap {
  Index begin;
  Index end;
  Bytes bytes;
};

// A point in the step at which `wanted` bytes could stay gathered but only `room` fit.
struct Cut {
  Bytes wanted;
  Bytes room;
};

struct Gathers {
  Bytes always = 0;  // bytes that are gathered whatever the memory
  Bytes gaps = 0;    // bytes that are gathered again unless they stay
  std::vector<Cut> cuts;
};

// Every gap is counted at one point that it spans, so what all gaps save is at most what the points
// have room for. The points are chosen by the rule for stabbing intervals: by rising end, each open
// interval is stabbed at its end.
Gathers gathersOf(const StepGraph& graph, const Usage& usage, Bytes budget) {
  Gathers result;
  std::vector<Gap> gaps;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    const Param& param = graph.params[p];
    const auto uses = usage.uses[p];
    if (uses.empty()) {
      continue;
    }
    result.always += param.frozen ? 0 : param.bytes;
    for (std::size_t i = 1; i < uses.size(); ++i) {
      if (uses[i] > uses[i - 1] + 1) {
        gaps.push_back({uses[i - 1] + 1, uses[i] - 1, param.bytes});
        result.gaps += param.bytes;
      }
    }
  }
  std::sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) { return a.end < b.end; });
  Index point = kNone;
  for (const Gap& gap : gaps) {
    if (point == kNone || gap.begin > point) {
      point = gap.end;
      result.cuts.push_back({0, budget - usage.live[point] - usage.gathered[point]});
    }
    result.cuts.back().wanted += gap.bytes;
  }
  return result;
}

Nanos gatherTime(const CostModel& cost, const Gathers& gathers, Bytes extra_room) {
  Bytes saved = 0;
  for (const Cut& cut : gathers.cuts) {
    saved += std::min(cut.wanted, std::max<Bytes>(0, cut.room + extra_room));
  }
  return cost.leastGather(gathers.always + gathers.gaps - saved);
}

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

LowerBound lowerBound(const StepGraph& graph, const Usage& usage, const CostModel& cost,
                      Bytes budget) {
  LowerBound bound;
  const auto slots = static_cast<Index>(graph.nodes.size());
  Nanos compute = 0;
  for (const Node& node : graph.nodes) {
    compute += node.time;
  }
  bound.launches = cost.machine().launch * slots;
  bound.reductions = cost.leastReduce(reducedBytes(graph, usage, 0));
  Gathers gathers = gathersOf(graph, usage, budget);
  if (graph.stage < 3) {
    for (std::size_t p = 0; p < graph.params.size(); ++p) {
      gathers.always += usage.update[p] != kNone ? graph.params[p].bytes : 0;
    }
  }
  // Offloading makes room, and every byte of it comes back over the host link at least once in a
  // step. The bound takes the amount that suits the plan best: where the gathers that are left take
  // as long as the copies.
  const bool shared = cost.machine().shared_links;
  const Nanos beside = shared ? bound.reductions : 0;
  Bytes low = 0;
  Bytes high = std::max<Bytes>(0, usage.resident) + gathers.gaps;
  while (low < high) {
    const Bytes middle = low + (high - low) / 2;
    const Nanos copies =
        middle == 0 ? 0 : mulDiv(middle, 1000000000, cost.machine().to_device.bandwidth);
    if (copies >= std::max(gatherTime(cost, gathers, middle) + beside, compute)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  bound.gathers = gatherTime(cost, gathers, low);
  bound.copies = 0;
  bound.links =
      shared ? bound.gathers + bound.reductions : std::max(bound.gathers, bound.reductions);
  // While collectives run, compute runs slower: T >= compute + links * s / (1 + s).
  bound.compute =
      compute + mulDiv(bound.links, cost.machine().slowdown, 1000 + cost.machine().slowdown);

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
  if (last_contribution != kNone) {
    Nanos done = 0;
    Nanos update = 0;
    for (Index slot = 0; slot < slots; ++slot) {
      if (slot <= last_contribution) {
        done += graph.nodes[slot].time;
      }
    }
    for (const Index param : graph.nodes[last_contribution].grads) {
      if (usage.update[param] != kNone) {
        update = std::max(update, graph.nodes[usage.update[param]].time);
      }
    }
    const Nanos last = cost.leastReduce(reducedBytes(graph, usage, last_contribution));
    bound.critical = std::max(bound.critical, late[last_contribution] + done + last + update);
  }
  bound.best = std::max({bound.compute, bound.gathers, bound.reductions, bound.links,
                         bound.critical, bound.launches});
  return bound;
}

}  // namespace dc::plan
