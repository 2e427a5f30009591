#include "deepcompile/plan/usage.h"

#include <algorithm>

namespace dc::plan {

Lists::Lists(std::size_t count, const std::vector<std::pair<Index, Index>>& pairs)
    : begin_(count + 2, 0), values_(pairs.size()) {
  // The beginnings stand one place too far, count up while the lists are filled, and end where they belong.
  for (const auto& [list, value] : pairs) {
    ++begin_[list + 2];
  }
  for (std::size_t i = 2; i < begin_.size() && !pairs.empty(); ++i) {
    begin_[i] += begin_[i - 1];
  }
  for (const auto& [list, value] : pairs) {
    values_[begin_[list + 1]++] = value;
  }
  begin_.pop_back();
}

Usage::Usage(const StepGraph& graph)
    : update(graph.params.size(), kNone),
      buffer_made(graph.buffers.size(), kNone),
      buffer_last(graph.buffers.size(), kNone),
      live(graph.nodes.size(), 0),
      gathered(graph.nodes.size(), 0) {
  const auto slots = static_cast<Index>(graph.nodes.size());
  std::vector<std::pair<Index, Index>> need_pairs;
  std::vector<std::pair<Index, Index>> use_pairs;
  std::vector<std::pair<Index, Index>> grad_pairs;
  std::vector<std::pair<Index, Index>> read_pairs;
  std::vector<Index> needed;
  for (Index slot = 0; slot < slots; ++slot) {
    const Node& node = graph.nodes[slot];
    needed = node.uses;
    for (const Index buffer : node.reads) {
      const Index base = baseBuffer(graph, buffer);
      if (graph.buffers[base].alias_param != kNone) {
        needed.push_back(graph.buffers[base].alias_param);
      } else {
        read_pairs.emplace_back(base, slot);
        buffer_last[base] = slot;
      }
    }
    for (const Index buffer : node.makes) {
      const Index base = baseBuffer(graph, buffer);
      if (base == buffer) {
        buffer_made[buffer] = slot;
      }
      if (graph.buffers[base].alias_param == kNone) {
        buffer_last[base] = std::max(buffer_last[base], slot);
      }
    }
    if (graph.stage == 3) {
      std::sort(needed.begin(), needed.end());
      needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
      for (const Index param : needed) {
        need_pairs.emplace_back(slot, param);
        use_pairs.emplace_back(param, slot);
        gathered[slot] += graph.params[param].bytes;
      }
    }
    for (const Index param : node.grads) {
      grad_pairs.emplace_back(param, slot);
      live[slot] += graph.params[param].grad;
    }
    for (const Index param : node.updates) {
      update[param] = slot;
    }
    live[slot] += node.workspace;
  }
  needs = Lists(graph.nodes.size(), need_pairs);
  uses = Lists(graph.params.size(), use_pairs);
  contributions = Lists(graph.params.size(), grad_pairs);
  buffer_reads = Lists(graph.buffers.size(), read_pairs);
  for (const Param& param : graph.params) {
    resident += param.shard + param.accum + param.state;
  }
  std::vector<Bytes> change(graph.nodes.size() + 1, 0);
  for (std::size_t b = 0; b < graph.buffers.size(); ++b) {
    if (graph.buffers[b].input) {
      resident += graph.buffers[b].bytes;
    } else if (buffer_made[b] != kNone) {
      change[buffer_made[b]] += graph.buffers[b].bytes;
      change[buffer_last[b] + 1] -= graph.buffers[b].bytes;
    }
  }
  Bytes held = resident;
  for (Index slot = 0; slot < slots; ++slot) {
    held += change[slot];
    live[slot] += held;
  }
}

}  // namespace dc::plan
