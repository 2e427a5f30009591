#include "deepcompile/plan/step_windows.h"

#include <algorithm>

namespace dc::plan {
namespace {

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

}  // namespace

Nanos reduceAndUpdate(const StepGraph& graph, const Usage& usage, const CostModel& cost, Index slot, Index end) {
  std::vector<std::pair<Index, Bytes>> completed;  // by this slot: update, gradient
  for (const Index param : graph.nodes[slot].grads) {
    if (usage.update[param] != kNone && usage.update[param] < end && usage.contributions[param].back() == slot) {
      completed.emplace_back(usage.update[param], graph.params[param].grad);
    }
  }
  std::sort(completed.begin(), completed.end());
  Nanos longest = 0;
  Bytes bytes = 0;
  for (const auto& [update, grad] : completed) {
    bytes += grad;
    Nanos rest = cost.leastReduce(bytes);
    for (Index next = update; next < end; ++next) {
      rest += graph.nodes[next].time;
    }
    longest = std::max(longest, rest);
  }
  return longest;
}

Cut windowsOf(const StepGraph& graph, const Usage& usage, const CostModel& cost, Bytes budget, bool turn) {
  Cut cut;
  std::vector<Window>& windows = cut.windows;
  std::vector<Index> begun(graph.nodes.size() + 1, 0);  // windows that begin at this slot or before
  std::vector<Index> used_in(graph.params.size(), kNone);
  std::vector<Index> seen(graph.params.size(), 0);
  std::size_t begin = 0;
  // What the slot before the window uses is there too, and is of no use when the window does not use it.
  const auto close = [&] {
    if (!windows.empty() && begin > 0) {
      for (const Index param : usage.needs[begin - 1]) {
        windows.back().room -= used_in[param] == static_cast<Index>(windows.size()) ? 0 : graph.params[param].bytes;
      }
    }
  };
  Bytes turned = 0;  // gradients that are complete after the first slot of this pass
  for (std::size_t slot = 0; slot < graph.nodes.size(); ++slot) {
    const Node& node = graph.nodes[slot];
    const auto starts = [&](std::size_t at) {
      return at == 0 || (at < graph.nodes.size() && (graph.nodes[at].phase != graph.nodes[at - 1].phase ||
                                                     graph.nodes[at].micro != graph.nodes[at - 1].micro));
    };
    const bool own = turn && starts(slot) && slot > 0 && node.phase == Phase::Backward &&
                     slot + 1 < graph.nodes.size() && !starts(slot + 1);
    const bool after_own = turn && slot > 1 && starts(slot - 1) && !starts(slot) && node.phase == Phase::Backward;
    if (starts(slot) || after_own) {
      close();
      begin = slot;
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
        Index end = static_cast<Index>(slot) + 1;
        while (end < static_cast<Index>(graph.nodes.size()) && !starts(end)) {
          ++end;
        }
        window.update_rest = window.update ? reduceAndUpdate(graph, usage, cost, static_cast<Index>(slot) - 1, end) : 0;
      }
      if (after_own) {
        // These gradients count as this window's own, not as a backlog.
        window.fresh = 0;
        window.reduced = turned;
      }
      windows.push_back(window);
    }
    begun[slot + 1] = static_cast<Index>(windows.size());
    Window& window = windows.back();
    window.compute += node.time;
    window.after_last += node.time;
    for (const Index param : usage.needs[slot]) {
      if (used_in[param] != static_cast<Index>(windows.size())) {
        used_in[param] = static_cast<Index>(windows.size());
        window.needed += own ? 0 : graph.params[param].bytes;
        window.after_last = node.time;
      }
    }
    turned = 0;
    for (const Index param : node.grads) {
      const auto slots = usage.contributions[param];
      const Index next = ++seen[param];
      const bool last = next == static_cast<Index>(slots.size());
      if (last || (graph.stage > 1 && graph.nodes[slots[next]].micro != node.micro)) {
        (own ? turned : window.reduced) += graph.params[param].grad;
      }
    }
  }
  close();
  for (std::size_t b = 0; b < graph.buffers.size(); ++b) {
    if (usage.buffer_made[b] != kNone) {
      // It counts for a window that begins at its maker's slot, up to one that begins after its last reader.
      const Index until = std::min(usage.buffer_last[b] + 1, static_cast<Index>(graph.nodes.size()) - 1);
      cut.spans = std::max(cut.spans, begun[until + 1] - begun[usage.buffer_made[b]]);
    }
  }
  return cut;
}

}  // namespace dc::plan
