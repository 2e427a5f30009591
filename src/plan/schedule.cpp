#include "deepcompile/plan/schedule.h"

#include <algorithm>

#include "deepcompile/plan/memory_tree.h"

namespace dc::plan {
namespace {

// Indices of things grouped by a position, in the order in which they are given.
template <typename Things, typename Position>
Lists byPosition(std::size_t positions, const Things& things, Position position) {
  std::vector<std::pair<Index, Index>> pairs;
  pairs.reserve(things.size());
  for (std::size_t i = 0; i < things.size(); ++i) {
    pairs.emplace_back(position(things[i]), static_cast<Index>(i));
  }
  return Lists(positions, pairs);
}

struct Group {
  Index launch = 0;
  Index first = 0;  // the earliest slot that needs one of them
  Index op = kNone;
  Index shards_op = kNone;  // the reload of those shards that are on the host
};

class Emitter {
 public:
  Emitter(const Problem& problem, const Schedule& schedule, Plan& plan)
      : graph_(problem.graph), schedule_(schedule), plan_(plan), writer_(plan) {
    const std::size_t positions = graph_.nodes.size() + 1;
    Index groups = 0;
    for (const Residency& residency : schedule.residencies) {
      groups = std::max(groups, residency.group + 1);
    }
    groups_.resize(static_cast<std::size_t>(groups), {kNone, static_cast<Index>(positions), kNone, kNone});
    std::vector<std::pair<Index, Index>> pairs;
    pairs.reserve(schedule.residencies.size());
    for (std::size_t i = 0; i < schedule.residencies.size(); ++i) {
      const Residency& residency = schedule.residencies[i];
      Group& group = groups_[residency.group];
      group.launch = residency.launch;
      group.first = std::min(group.first, residency.first);
      pairs.emplace_back(residency.group, static_cast<Index>(i));
    }
    members_ = Lists(groups_.size(), pairs);
    // Several groups at one position start in the order in which they are needed.
    std::vector<Index> order;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].launch != kNone) {
        order.push_back(static_cast<Index>(g));
      }
    }
    const auto sooner = [&](Index a, Index b) { return groups_[a].first < groups_[b].first; };
    if (!std::is_sorted(order.begin(), order.end(), sooner)) {
      std::stable_sort(order.begin(), order.end(), sooner);
    }
    pairs.clear();
    for (const Index g : order) {
      pairs.emplace_back(groups_[g].launch, g);
    }
    launches_ = Lists(positions, pairs);
    pairs.clear();
    for (const Index g : order) {
      if (groups_[g].first < static_cast<Index>(graph_.nodes.size())) {
        pairs.emplace_back(groups_[g].first, g);
      }
    }
    waits_ = Lists(positions, pairs);
    releases_ = byPosition(positions, schedule.residencies, [](const Residency& r) { return r.last; });
    reduce_starts_ = byPosition(positions, schedule.reductions, [](const Reduction& r) { return r.launch; });
    reduce_waits_ = byPosition(positions, schedule.reductions, [](const Reduction& r) { return r.wait; });
    offloads_ = byPosition(positions, schedule.moves, [](const Move& m) { return m.offload; });
    offload_waits_ = byPosition(positions, schedule.moves, [](const Move& m) { return m.offloaded; });
    reloads_ = byPosition(positions, schedule.moves, [](const Move& m) { return m.reload; });
    reload_waits_ = byPosition(positions, schedule.moves, [](const Move& m) { return m.need; });
    reduce_op_.assign(schedule.reductions.size(), kNone);
    offload_op_.assign(schedule.moves.size(), kNone);
    reload_op_.assign(schedule.moves.size(), kNone);
  }

  void run() {
    const std::size_t most = graph_.nodes.size() + 4 * schedule_.residencies.size() + 2 * schedule_.reductions.size() +
                             4 * schedule_.moves.size();
    plan_.instructions.reserve(most);
    plan_.reasons.reserve(most);
    start();
    const auto slots = static_cast<Index>(graph_.nodes.size());
    for (Index k = 0; k <= slots; ++k) {
      before(k);
      if (k < slots) {
        writer_.node(graph_, k);
        after(k);
      }
    }
  }

 private:
  bool onHost(Index param) const { return !schedule_.shard_on_host.empty() && schedule_.shard_on_host[param] != 0; }

  void start() {
    plan_.start_gathered = schedule_.start_gathered;
    for (std::size_t p = 0; p < graph_.params.size(); ++p) {
      if (onHost(static_cast<Index>(p))) {
        plan_.start_on_host.push_back({ItemKind::Shard, static_cast<Index>(p)});
      }
    }
    for (const Move& move : schedule_.moves) {
      if (move.item.kind == ItemKind::State && move.offload > move.need) {
        plan_.start_on_host.push_back(move.item);
      }
    }
    std::sort(plan_.start_on_host.begin(), plan_.start_on_host.end());
  }

  void before(Index k) {
    for (const Index r : reduce_starts_[k]) {
      const Reduction& reduction = schedule_.reductions[r];
      reduce_op_[r] = writer_.start(NodeKind::Reduce, std::span<const Index>(reduction.params), reduction.reason);
    }
    for (const Index m : offloads_[k]) {
      startMove(NodeKind::Offload, schedule_.moves[m], offload_op_[m]);
    }
    for (const Index r : reduce_waits_[k]) {
      writer_.wait(reduce_op_[r], schedule_.reductions[r].wait_reason);
    }
    for (const Index m : offload_waits_[k]) {
      writer_.wait(offload_op_[m], {Why::Sunk});
    }
    for (const Index m : reloads_[k]) {
      startMove(NodeKind::Reload, schedule_.moves[m], reload_op_[m]);
    }
    for (const Index g : launches_[k]) {
      gather(g);
    }
    for (const Index g : waits_[k]) {
      if (groups_[g].shards_op != kNone) {
        writer_.wait(groups_[g].shards_op, {Why::NeededNow});
      }
      writer_.wait(groups_[g].op, {Why::NeededNow});
      for (const Index i : members_[g]) {
        if (onHost(schedule_.residencies[i].param)) {
          writer_.release({ItemKind::Shard, schedule_.residencies[i].param}, {Why::Returned});
        }
      }
    }
    for (const Index m : reload_waits_[k]) {
      writer_.wait(reload_op_[m], {Why::NeededNow});
    }
  }

  // States travel with their shard when that is on the host too.
  void startMove(NodeKind kind, const Move& move, Index& op) {
    std::vector<Item> items = {move.item};
    if (move.item.kind == ItemKind::State && onHost(move.item.id)) {
      items.push_back({ItemKind::Shard, move.item.id});
    }
    op = writer_.start(kind, std::span<const Item>(items), move.reason);
  }

  void gather(Index g) {
    std::vector<Index>& params = params_;
    params.clear();
    std::vector<Item> shards;
    for (const Index i : members_[g]) {
      const Index param = schedule_.residencies[i].param;
      params.push_back(param);
      if (onHost(param)) {
        shards.push_back({ItemKind::Shard, param});
      }
    }
    if (!shards.empty()) {
      // The gather itself follows the reload of its shards.
      groups_[g].shards_op = writer_.start(NodeKind::Reload, std::span<const Item>(shards), {Why::OverBudget});
    }
    groups_[g].op = writer_.start(NodeKind::Gather, std::span<const Index>(params),
                                  schedule_.residencies[members_[g].front()].reason);
  }

  void after(Index k) {
    if (graph_.stage < 3) {
      return;
    }
    for (const Index i : releases_[k]) {
      writer_.release({ItemKind::Param, schedule_.residencies[i].param}, schedule_.residencies[i].release_reason);
    }
  }

  const StepGraph& graph_;
  const Schedule& schedule_;
  Plan& plan_;
  PlanWriter writer_;
  std::vector<Group> groups_;
  Lists members_, launches_, waits_, releases_, reduce_starts_, reduce_waits_;
  Lists offloads_, offload_waits_, reloads_, reload_waits_;
  std::vector<Index> reduce_op_, offload_op_, reload_op_;
  std::vector<Index> params_;  // of the gather at hand
};

}  // namespace

Plan emit(const Problem& problem, const Schedule& schedule, std::string_view strategy) {
  Plan plan;
  plan.strategy = strategy;
  plan.graph = problem.graph.name;
  plan.budget = problem.budget;
  Emitter(problem, schedule, plan).run();
  return plan;
}

std::vector<Reduction> bucketReductions(const Problem& problem, Bytes bucket, std::size_t depth) {
  const StepGraph& graph = problem.graph;
  std::vector<Reduction> reductions;
  Reduction open;
  Bytes bytes = 0;
  Index micro = kNone;
  std::vector<Index> left(graph.params.size(),
                          0);  // contributions that are still to come (in this micro-batch)
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    left[p] = static_cast<Index>(problem.usage.contributions[p].size());
  }
  const auto flush = [&](Index launch, Why why) {
    if (!open.params.empty()) {
      open.launch = launch;
      open.wait = static_cast<Index>(graph.nodes.size());
      open.reason = {why, bytes, 0};
      for (const Index param : open.params) {
        const Index update = problem.usage.update[param];
        open.wait = update == kNone ? open.wait : std::min(open.wait, std::max(update, launch));
      }
      open.wait_reason = {open.wait == static_cast<Index>(graph.nodes.size()) ? Why::Sunk : Why::BeforeUpdate};
      reductions.push_back(std::move(open));
    }
    open = {};
    bytes = 0;
  };
  const auto slots = static_cast<Index>(graph.nodes.size());
  for (Index slot = 0; slot < slots; ++slot) {
    const Node& node = graph.nodes[slot];
    if (node.micro != micro || node.kind == NodeKind::Optimizer) {
      flush(slot, Why::BucketEnd);
      micro = node.micro;
    }
    for (const Index param : node.grads) {
      const auto slots_of = problem.usage.contributions[param];
      --left[param];
      const std::size_t next = slots_of.size() - static_cast<std::size_t>(left[param]);
      const bool last_of_micro = left[param] == 0 || graph.nodes[slots_of[next]].micro != micro;
      if (graph.stage == 1 ? left[param] == 0 : last_of_micro) {
        open.params.push_back(param);
        bytes += graph.params[param].grad;
      }
    }
    if (bytes >= bucket) {
      flush(slot + 1, Why::BucketFull);
    }
  }
  flush(slots, Why::BucketEnd);
  // A bucket's memory comes back when the one `depth` later starts.
  for (std::size_t i = 0; i + depth < reductions.size(); ++i) {
    if (reductions[i + depth].launch <= reductions[i].wait) {
      reductions[i].wait = reductions[i + depth].launch;
      reductions[i].wait_reason = {Why::ForMemory};
    }
  }
  return reductions;
}

std::vector<Residency> refreshAfterUpdate(const Problem& problem, Bytes bucket) {
  std::vector<Residency> residencies;
  if (problem.graph.stage == 3) {
    return residencies;
  }
  const auto slots = static_cast<Index>(problem.graph.nodes.size());
  Index group = 0;
  Bytes bytes = 0;
  std::size_t open = 0;  // the first residency of the open bucket
  for (Index slot = 0; slot < slots; ++slot) {
    for (const Index param : problem.graph.nodes[slot].updates) {
      residencies.push_back({param, slot + 1, slots, slots, group, {Why::AfterUpdate}, {}});
      bytes += problem.graph.params[param].bytes;
    }
    if (open < residencies.size() && (bytes >= bucket || slot + 1 == slots)) {
      for (; open < residencies.size(); ++open) {
        residencies[open].launch = slot + 1;
      }
      ++group;
      bytes = 0;
    }
  }
  for (; open < residencies.size(); ++open) {
    residencies[open].launch = slots;
  }
  return residencies;
}

void holdGradients(const Problem& problem, const std::vector<Reduction>& reductions, MemoryTree& memory) {
  if (problem.graph.stage == 1) {
    return;  // the accumulator is resident
  }
  std::vector<std::size_t> next(problem.graph.params.size(), 0);
  for (const Reduction& reduction : reductions) {
    for (const Index param : reduction.params) {
      const auto slots = problem.usage.contributions[param];
      const Bytes bytes = problem.graph.params[param].grad;
      // From the first contribution on; the slots that contribute count their own gradient already.
      Index from = slots[next[param]] + 1;
      ++next[param];
      while (next[param] < slots.size() && slots[next[param]] < reduction.launch) {
        memory.add(from, slots[next[param]] - 1, bytes);
        from = slots[next[param]] + 1;
        ++next[param];
      }
      memory.add(from, reduction.wait - 1, bytes);
    }
  }
}

}  // namespace dc::plan
