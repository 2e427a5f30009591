#include "deepcompile/plan/prefetch_limit.h"

#include <algorithm>
#include <map>
#include <vector>

namespace dc::plan {
namespace {

struct Use {
  Index slot;  // of the node that uses it first
  Item item;
};

// The first node from `from` on that uses the parameter; `from` itself where none does.
Index firstUse(const StepGraph& graph, Index param, Index from) {
  for (Index slot = from; slot < static_cast<Index>(graph.nodes.size()); ++slot) {
    if (std::ranges::find(graph.nodes[slot].uses, param) != graph.nodes[slot].uses.end()) {
      return slot;
    }
  }
  return from;
}

// In the order of use, cut where two uses are more than `ahead` apart.
std::vector<std::vector<Use>> chunksOf(std::vector<Use> uses, Index ahead) {
  std::ranges::stable_sort(uses, {}, &Use::slot);
  std::vector<std::vector<Use>> chunks;
  for (const Use& use : uses) {
    if (chunks.empty() || use.slot - chunks.back().front().slot > ahead) {
      chunks.emplace_back();
    }
    chunks.back().push_back(use);
  }
  return chunks;
}

// What takes the place of a gather, by the node that it comes before.
struct Moved {
  std::multimap<Index, std::pair<Index, std::vector<Item>>> gathers;  // with the operation's number
  std::multimap<Index, Index> waits;
  std::vector<char> replaced;  // by operation of the old plan
};

Moved moveLate(const StepGraph& graph, const Plan& plan, Index ahead) {
  Moved moved;
  moved.replaced.assign(static_cast<std::size_t>(plan.ops), 0);
  Index operations = plan.ops;
  Index slot = 0;
  for (const Instruction& in : plan.instructions) {
    if (in.node != kNone) {
      slot = in.node + 1;
    }
    if (in.kind != NodeKind::Gather) {
      continue;
    }
    std::vector<Use> uses;
    for (const Item& item : plan.itemsOf(in)) {
      uses.push_back({firstUse(graph, item.id, slot), item});
    }
    const std::vector<std::vector<Use>> chunks = chunksOf(std::move(uses), ahead);
    if (chunks.size() == 1 && chunks[0].back().slot - ahead <= slot) {
      continue;  // early enough as it is
    }
    moved.replaced[in.op] = 1;
    for (const std::vector<Use>& chunk : chunks) {
      std::vector<Item> items;
      for (const Use& use : chunk) {
        items.push_back(use.item);
      }
      moved.gathers.emplace(std::max(slot, chunk.back().slot - ahead), std::pair{operations, std::move(items)});
      moved.waits.emplace(chunk.front().slot, operations);
      ++operations;
    }
  }
  return moved;
}

}  // namespace

Plan limitPrefetch(const StepGraph& graph, const Plan& plan, Index ahead) {
  const Moved moved = moveLate(graph, plan, ahead);
  Plan result = plan;
  result.instructions.clear();
  result.reasons.clear();
  result.items.clear();
  result.ops = 0;
  std::map<Index, Index> renumbered;
  PlanWriter writer(result);
  const auto gather = [&](Index old, std::span<const Item> items, const Reason& reason) {
    renumbered[old] = writer.start(NodeKind::Gather, items, reason);
  };
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& in = plan.instructions[i];
    if (in.node != kNone) {
      const auto [begin, end] = moved.gathers.equal_range(in.node);
      for (auto it = begin; it != end; ++it) {
        gather(it->second.first, it->second.second, {Why::Program, 0, 0});
      }
      const auto [first, last] = moved.waits.equal_range(in.node);
      for (auto it = first; it != last; ++it) {
        writer.wait(renumbered.at(it->second), {Why::NeededNow, 0, 0});
      }
      writer.node(graph, in.node);
      continue;
    }
    const bool names_gather = in.op != kNone && moved.replaced[in.op] != 0;
    if (names_gather) {
      continue;  // the gather, or its wait
    }
    if (in.kind == NodeKind::Wait) {
      writer.wait(renumbered.at(in.op), plan.reasons[i]);
    } else if (in.kind == NodeKind::Release) {
      for (const Item& item : plan.itemsOf(in)) {
        writer.release(item, plan.reasons[i]);
      }
    } else {
      renumbered[in.op] = writer.start(in.kind, plan.itemsOf(in), plan.reasons[i]);
    }
  }
  return result;
}

}  // namespace dc::plan
