#include "deepcompile/plan/lower_bound.h"

#include <algorithm>
#include <array>
#include <limits>

namespace dc::plan {
namespace {

// A pass of a micro-batch: a run of slots of one phase. What it uses must be gathered while it
// runs, except what memory holds when it begins; what it contributes must be reduced while it runs,
// except what memory holds when it ends.
struct Window {
  Nanos compute = 0;
  Bytes needed = 0;       // parameters that it uses, each once
  Bytes reduced = 0;      // gradients that it completes
  Bytes room = 0;         // beside the slot before it: for what is gathered and what is not reduced
  Bytes first_room = 0;   // beside its first slot: for what is gathered
  Bytes activations = 0;  // live in these two slots at most
  Bytes fresh = 0;        // gradients that the slot before it made itself, not part of the room
  bool update = false;    // of the optimizer
};

Bytes gradsOf(const StepGraph& graph, std::size_t slot) {
  Bytes bytes = 0;
  for (const Index param : graph.nodes[slot].grads) {
    bytes += graph.params[param].grad;
  }
  return bytes;
}

Bytes buffersAt(const StepGraph& graph, const Usage& usage, std::size_t slot) {
  return usage.live[slot] - usage.resident - graph.nodes[slot].workspace - gradsOf(graph, slot);
}

std::vector<Window> windowsOf(const StepGraph& graph, const Usage& usage, Bytes budget) {
  std::vector<Window> windows;
  std::vector<Index> used_in(graph.params.size(), kNone);
  std::vector<Index> seen(graph.params.size(), 0);
  for (std::size_t slot = 0; slot < graph.nodes.size(); ++slot) {
    const Node& node = graph.nodes[slot];
    if (slot == 0 || node.phase != graph.nodes[slot - 1].phase || node.micro != graph.nodes[slot - 1].micro) {
      // A window lasts from the end of the slot before it to the end of its own last slot. What was
      // gathered before it and is used in it is there while both that slot and its first slot run:
      // a gather that stands after a slot starts after it. What is not reduced yet when the window
      // begins is there while the slot before it runs.
      Window window;
      window.update = node.kind == NodeKind::Optimizer;
      window.first_room = budget - usage.live[slot];
      window.room = window.first_room;
      window.activations = buffersAt(graph, usage, slot);
      if (slot > 0) {
        window.room = budget - usage.live[slot - 1];
        window.activations = std::max(window.activations, buffersAt(graph, usage, slot - 1));
        window.fresh = gradsOf(graph, slot - 1);
      }
      windows.push_back(window);
    }
    Window& window = windows.back();
    window.compute += node.time;
    for (const Index param : usage.needs[slot]) {
      if (used_in[param] != static_cast<Index>(windows.size())) {
        used_in[param] = static_cast<Index>(windows.size());
        window.needed += graph.params[param].bytes;
      }
    }
    for (const Index param : node.grads) {
      const auto slots = usage.contributions[param];
      const Index next = ++seen[param];
      const bool last = next == static_cast<Index>(slots.size());
      if (last || (graph.stage > 1 && graph.nodes[slots[next]].micro != node.micro)) {
        window.reduced += graph.params[param].grad;
      }
    }
  }
  return windows;
}

// The least time of a window when everything movable is away: for when windows begin at the
// earliest, and how much of the step is left after they begin at the most.
Nanos leastOf(const StepGraph& graph, const CostModel& cost, const std::vector<Window>& windows, std::size_t w,
              Bytes frozen, Bytes movable) {
  const Window& window = windows[w];
  const auto room = [&](Bytes bytes, std::size_t at) {
    return std::max<Bytes>(0, bytes + movable + windows[at].activations);
  };
  const Bytes held = w == 0 ? frozen : std::min(room(window.room, w), room(window.first_room, w));
  const Nanos gathers = cost.leastGather(std::max<Bytes>(0, window.needed - held));
  const Bytes left = w + 1 == windows.size() ? 0 : room(windows[w + 1].room, w + 1) + windows[w + 1].fresh;
  const Bytes carried = graph.stage == 1 ? window.reduced : left;
  const Nanos reductions = cost.leastReduce(std::max<Bytes>(0, window.reduced - carried));
  const Nanos links = cost.machine().shared_links ? gathers + reductions : std::max(gathers, reductions);
  return std::max(links, window.compute);
}

struct Sums {
  Nanos step = 0;  // over the windows, the larger of compute and links
  Nanos gathers = 0;
};

// A lower bound for steps of at most `step`. Offloading makes room, but what is away when a window
// begins must come back over the host link in the rest of the step: states and shards once,
// activations once for every micro-batch.
Sums over(const StepGraph& graph, const CostModel& cost, const std::vector<Window>& windows, Bytes frozen,
          Nanos reductions, Nanos step) {
  Bytes movable = 0;
  for (const Param& param : graph.params) {
    movable += param.state + param.shard;
  }
  const auto crossing = [&](Nanos time, const Link& link) {
    return static_cast<Bytes>(
        std::min<Wide>(kLargest, static_cast<Wide>(std::max<Nanos>(0, time)) * link.bandwidth / 1000000000));
  };
  const Link& back = cost.machine().to_device;
  const Link& out = cost.machine().to_host;
  // What is away when a window begins has left before, or began the step on the host and leaves
  // after its update; and it comes back after.
  std::vector<Nanos> begin(windows.size() + 1, 0);
  for (std::size_t w = 0; w < windows.size(); ++w) {
    begin[w + 1] = begin[w] + leastOf(graph, cost, windows, w, frozen, movable);
  }
  const Nanos all = begin[windows.size()];
  std::size_t update = windows.size();
  while (update > 0 && windows[update - 1].update) {
    --update;
  }
  const Bytes leaves_after = crossing(step - begin[update], out);
  const auto away_at = [&](std::size_t w) {
    const Bytes left = crossing(step - (all - begin[w]), out) + leaves_after;
    return std::min({movable, crossing(step - begin[w], back), left});
  };
  const auto room = [&](std::size_t w) -> Bytes {
    return w == windows.size() ? 0 : std::max<Bytes>(0, windows[w].room + away_at(w));
  };
  const std::int64_t slowdown = cost.machine().slowdown;
  // Bandwidth alone: a reduction may run across a boundary, so its latency belongs to no window.
  const auto reduceTime = [&](Bytes bytes) {
    return bytes <= 0 ? 0 : std::max<Nanos>(0, cost.leastReduce(bytes) - cost.leastReduce(1));
  };
  // What is not reduced when a window begins takes room from what it finds gathered, and must be
  // reduced later. The bound follows that backlog from boundary to boundary in steps of a sixteenth
  // of the most it can be: whatever it is, it lies between two of them.
  constexpr Bytes kSteps = 16;
  Bytes all_grads = 0;
  for (const Param& param : graph.params) {
    all_grads += param.grad;
  }
  const auto mostBacklog = [&](std::size_t w) -> Bytes {
    if (w == 0 || w == windows.size()) {
      return 0;
    }
    return graph.stage == 1 ? all_grads : std::min(all_grads, room(w) + windows[w].fresh);
  };
  const Nanos unreached = std::numeric_limits<Nanos>::max() / 2;
  std::array<Nanos, kSteps> best{};  // by the backlog when the window begins
  std::fill(best.begin() + 1, best.end(), unreached);
  Sums sums;
  Bytes away = 0;  // activations that could be away when a window begins
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const Window& window = windows[w];
    const Bytes most_room = std::max<Bytes>(0, window.first_room + away_at(w));
    std::array<Nanos, kSteps> gathers{};
    for (Bytes j = 0; j < kSteps; ++j) {
      const Bytes backlog = mulDiv(mostBacklog(w), j, kSteps);
      const Bytes taken = graph.stage == 1 ? 0 : std::max<Bytes>(0, backlog - window.fresh);
      const Bytes held = w == 0 ? frozen : std::min(most_room, std::max<Bytes>(0, room(w) - taken));
      gathers[j] = cost.leastGather(std::max<Bytes>(0, window.needed - held));
    }
    std::array<Nanos, kSteps> next;
    next.fill(unreached);
    for (Bytes to = 0; to < kSteps; ++to) {
      const Bytes leaves = mulDivUp(mostBacklog(w + 1), to + 1, kSteps);
      for (Bytes from = 0; from < kSteps; ++from) {
        const Bytes comes = mulDiv(mostBacklog(w), from, kSteps);
        const Nanos reduced = reduceTime(comes + window.reduced - leaves);
        const Nanos links = cost.machine().shared_links ? gathers[from] + reduced : std::max(gathers[from], reduced);
        const Nanos time = std::max(links, window.compute + mulDiv(links, slowdown, 1000 + slowdown));
        next[to] = std::min(next[to], std::min(unreached, best[from] + time));
      }
    }
    best = next;
    sums.gathers += gathers[0];
    away += std::min(window.activations, crossing(step - begin[w], back));
  }
  sums.step = *std::min_element(best.begin(), best.end());
  // Each byte of activations that is away makes room for one byte more, gathered or not reduced.
  const Bytes saved = std::min(away, crossing(step, back));
  const Nanos credit = std::max(cost.leastGather(saved), cost.leastReduce(saved));
  sums.step = std::max<Nanos>(0, sums.step - credit);
  sums.gathers = std::max<Nanos>(0, sums.gathers - cost.leastGather(saved));
  sums.step =
      std::max(sums.step, cost.machine().shared_links ? sums.gathers + reductions : std::max(sums.gathers, reductions));
  return sums;
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

LowerBound lowerBound(const StepGraph& graph, const Usage& usage, const CostModel& cost, Bytes budget) {
  LowerBound bound;
  const auto slots = static_cast<Index>(graph.nodes.size());
  Nanos compute = 0;
  for (const Node& node : graph.nodes) {
    compute += node.time;
  }
  bound.launches = cost.machine().launch * slots;
  bound.reductions = cost.leastReduce(reducedBytes(graph, usage, 0));
  Bytes frozen = 0;
  Bytes refreshed = 0;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    frozen += graph.params[p].frozen ? graph.params[p].bytes : 0;
    refreshed += graph.stage < 3 && usage.update[p] != kNone ? graph.params[p].bytes : 0;
  }
  const std::vector<Window> windows = windowsOf(graph, usage, budget);
  // The longer a step may take, the more can be moved to make room, the less must be gathered: the
  // bound is the shortest step that is not refuted.
  Nanos low = 0;
  Nanos high = over(graph, cost, windows, frozen, bound.reductions, 0).step + 1;
  while (low < high) {
    const Nanos middle = low + (high - low) / 2;
    if (over(graph, cost, windows, frozen, bound.reductions, middle).step <= middle) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  bound.windows = low;
  bound.gathers = over(graph, cost, windows, frozen, bound.reductions, low).gathers + cost.leastGather(refreshed);
  const bool shared = cost.machine().shared_links;
  bound.links = shared ? bound.gathers + bound.reductions : std::max(bound.gathers, bound.reductions);
  // While collectives run, compute runs slower: T >= compute + links * s / (1 + s).
  bound.compute = compute + mulDiv(bound.links, cost.machine().slowdown, 1000 + cost.machine().slowdown);

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
  bound.best = std::max(
      {bound.windows, bound.compute, bound.gathers, bound.reductions, bound.links, bound.critical, bound.launches});
  return bound;
}

}  // namespace dc::plan
