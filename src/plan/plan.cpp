#include "deepcompile/plan/plan.h"

#include "deepcompile/plan/text.h"

namespace dc::plan {

void PlanWriter::node(const StepGraph& graph, Index slot) {
  plan_.instructions.push_back({graph.nodes[slot].kind, slot, kNone, 0, 0});
  plan_.reasons.emplace_back();
}

Index PlanWriter::start(NodeKind kind, std::span<const Item> items, Reason reason) {
  plan_.instructions.push_back(
      {kind, kNone, plan_.ops, static_cast<Index>(plan_.items.size()), static_cast<Index>(items.size())});
  plan_.items.insert(plan_.items.end(), items.begin(), items.end());
  plan_.reasons.push_back(reason);
  return plan_.ops++;
}

Index PlanWriter::start(NodeKind kind, std::span<const Index> params, Reason reason) {
  plan_.instructions.push_back(
      {kind, kNone, plan_.ops, static_cast<Index>(plan_.items.size()), static_cast<Index>(params.size())});
  for (const Index param : params) {
    plan_.items.push_back({ItemKind::Param, param});
  }
  plan_.reasons.push_back(reason);
  return plan_.ops++;
}

void PlanWriter::wait(Index op, Reason reason) {
  plan_.instructions.push_back({NodeKind::Wait, kNone, op, 0, 0});
  plan_.reasons.push_back(reason);
}

void PlanWriter::release(Item item, Reason reason) {
  plan_.instructions.push_back({NodeKind::Release, kNone, kNone, static_cast<Index>(plan_.items.size()), 1});
  plan_.items.push_back(item);
  plan_.reasons.push_back(reason);
}

Resource resourceOf(NodeKind kind) {
  switch (kind) {
    case NodeKind::Gather:
      return Resource::Gather;
    case NodeKind::Reduce:
      return Resource::Reduce;
    case NodeKind::Reload:
      return Resource::HostToDevice;
    case NodeKind::Offload:
      return Resource::DeviceToHost;
    default:
      return Resource::Compute;
  }
}

std::string hashOf(const Plan& plan) {
  Hash hash;
  const auto add = [&](const Item& item) {
    hash.add(static_cast<std::uint64_t>(item.kind) << 32 | static_cast<std::uint32_t>(item.id));
  };
  hash.add(static_cast<std::uint64_t>(plan.budget));
  hash.add(plan.start_on_host.size());
  for (const Item& item : plan.start_on_host) {
    add(item);
  }
  hash.add(plan.start_gathered.size());
  for (const Index param : plan.start_gathered) {
    hash.add(static_cast<std::uint64_t>(param));
  }
  for (const Instruction& instruction : plan.instructions) {
    hash.add(static_cast<std::uint64_t>(instruction.kind) << 56 |
             static_cast<std::uint64_t>(static_cast<std::uint32_t>(instruction.op)) << 20 |
             static_cast<std::uint64_t>(static_cast<std::uint32_t>(instruction.count)));
    hash.add(static_cast<std::uint64_t>(static_cast<std::uint32_t>(instruction.node)));
    for (const Item& item : plan.itemsOf(instruction)) {
      add(item);
    }
  }
  return hash.hex();
}

Bytes deviceBytes(const StepGraph& graph, const Item& item) {
  switch (item.kind) {
    case ItemKind::Param:
      return graph.params[item.id].bytes;
    case ItemKind::State:
      return graph.params[item.id].state;
    case ItemKind::Shard:
      return graph.params[item.id].shard;
    default:
      return graph.buffers[item.id].bytes;
  }
}

}  // namespace dc::plan
