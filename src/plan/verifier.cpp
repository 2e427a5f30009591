#include "deepcompile/plan/verifier.h"

#include <algorithm>
#include <array>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/verifier_books.h"

namespace dc::plan {
namespace {

constexpr std::array<std::string_view, 16> kNames = {
    "well formed",           "every node once",     "dependencies first",    "gathered before use",
    "waited before read",    "kept until last use", "aliases respected",     "never stale",
    "persistent once",       "reduced once",        "reduced before update", "on device when used",
    "copied before dropped", "steady state",        "within budget",         "same on all ranks"};

}  // namespace

namespace detail {

std::optional<Violation> Verifier::run() {
  if (!wellFormed()) {
    return violation_;
  }
  begin();
  for (std::size_t i = 0; i < plan_.instructions.size() && !violation_; ++i) {
    at_ = static_cast<Index>(i);
    step(plan_.instructions[i]);
    if (!violation_ && peak_ > plan_.budget) {
      refuse(Property::WithinBudget,
             concat("needs ", peak_, " bytes at ", describe(plan_.instructions[i]), ", the budget is ", plan_.budget));
    }
  }
  if (!violation_) {
    end();
  }
  return violation_;
}

bool Verifier::refuse(Property property, const std::string& reason) {
  if (!violation_) {
    violation_ = Violation{property, at_, reason};
  }
  return false;
}

std::string Verifier::describe(const Instruction& instruction) const {
  std::string text(name(instruction.kind));
  if (instruction.node != kNone) {
    text += " '" + node(instruction.node) + "'";
  } else if (instruction.count > 0) {
    text += " of '" + nameOf(graph_, plan_.items[instruction.first]) + "'";
  } else if (instruction.op != kNone) {
    text += concat(" for operation ", instruction.op);
  }
  return text;
}

Index Verifier::root(Index buffer) const {
  while (graph_.buffers[buffer].alias_buffer != kNone) {
    buffer = graph_.buffers[buffer].alias_buffer;
  }
  return buffer;
}

bool Verifier::itemExists(const Item& item) const {
  const std::size_t count = item.kind == ItemKind::Buffer ? graph_.buffers.size() : graph_.params.size();
  return item.id >= 0 && static_cast<std::size_t>(item.id) < count;
}

bool Verifier::wellFormed() {
  std::vector<char> started(static_cast<std::size_t>(std::max<Index>(plan_.ops, 0)), 0);
  for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
    at_ = static_cast<Index>(i);
    const Instruction& in = plan_.instructions[i];
    const bool runs_node = in.kind == NodeKind::Compute || in.kind == NodeKind::Optimizer;
    const bool has_op = !runs_node && in.kind != NodeKind::Release;
    if (runs_node) {
      if (in.node < 0 || static_cast<std::size_t>(in.node) >= graph_.nodes.size() ||
          graph_.nodes[in.node].kind != in.kind) {
        return refuse(Property::WellFormed, concat("node ", in.node, " does not exist or is of another kind"));
      }
      continue;
    }
    if (has_op && (in.op < 0 || in.op >= plan_.ops)) {
      return refuse(Property::WellFormed, concat("operation ", in.op, " does not exist"));
    }
    if (in.kind == NodeKind::Wait) {
      if (started[in.op] != 1) {
        return refuse(Property::WellFormed,
                      concat("a wait for operation ", in.op,
                             started[in.op] == 0 ? ", which has not been started" : ", which was already waited for"));
      }
      started[in.op] = 2;
      continue;
    }
    if (has_op && started[in.op]++ != 0) {
      return refuse(Property::WellFormed, concat("operation ", in.op, " is started twice"));
    }
    if (in.first < 0 || in.count < 1 || static_cast<std::size_t>(in.first) + in.count > plan_.items.size()) {
      return refuse(Property::WellFormed, "an instruction without items");
    }
    for (const Item& item : plan_.itemsOf(in)) {
      const bool moves = in.kind == NodeKind::Offload || in.kind == NodeKind::Reload;
      const bool fits =
          moves ? item.kind != ItemKind::Param
                : item.kind == ItemKind::Param || (in.kind == NodeKind::Release && item.kind == ItemKind::Shard);
      if (!fits || !itemExists(item) ||
          (item.kind == ItemKind::Buffer && graph_.buffers[item.id].alias_buffer != kNone)) {
        return refuse(Property::WellFormed, concat("a ", name(in.kind), " of something that it cannot work on"));
      }
    }
  }
  at_ = kNone;
  for (const Item& item : plan_.start_on_host) {
    if (!itemExists(item) || (item.kind != ItemKind::State && item.kind != ItemKind::Shard)) {
      return refuse(Property::WellFormed, "the step begins with something on the host that cannot be there");
    }
  }
  for (const Index id : plan_.start_gathered) {
    if (id < 0 || static_cast<std::size_t>(id) >= graph_.params.size() || !graph_.params[id].frozen) {
      return refuse(Property::NeverStale, "the step begins with a gathered parameter that is not frozen");
    }
  }
  return true;
}

void Verifier::begin() {
  params_.resize(graph_.params.size());
  buffers_.resize(graph_.buffers.size());
  ops_.resize(static_cast<std::size_t>(plan_.ops));
  ran_.assign(graph_.nodes.size(), 0);
  maker_.assign(graph_.buffers.size(), kNone);
  dying_.resize(graph_.nodes.size());
  for (const Param& p : graph_.params) {
    held_ += p.shard + p.accum + p.state;
  }
  std::vector<char> present(graph_.nodes.size(), 0);
  for (const Instruction& in : plan_.instructions) {
    if (in.node != kNone) {
      present[in.node] = 1;
    }
  }
  for (std::size_t n = 0; n < present.size(); ++n) {
    if (present[n] == 0) {
      refuse(Property::EveryNodeOnce, concat("node '", graph_.nodes[n].name, "' never runs"));
    }
  }
  for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
    for (const Index b : graph_.nodes[n].makes) {
      maker_[b] = static_cast<Index>(n);
    }
    for (const Index p : graph_.nodes[n].grads) {
      ++params_[p].contributions;
    }
  }
  for (std::size_t b = 0; b < graph_.buffers.size(); ++b) {
    if (graph_.buffers[b].input) {
      buffers_[b].place = Place::Device;
      buffers_[b].made = true;
      held_ += graph_.buffers[b].bytes;
    }
    if (maker_[b] != kNone) {
      Index& last = buffers_[root(static_cast<Index>(b))].last_reader;
      last = std::max(last, maker_[b]);
    }
  }
  for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
    for (const Index b : graph_.nodes[n].reads) {
      Index& last = buffers_[root(b)].last_reader;
      last = std::max(last, static_cast<Index>(n));
    }
  }
  for (std::size_t b = 0; b < graph_.buffers.size(); ++b) {
    if (!graph_.buffers[b].input && maker_[b] != kNone && buffers_[b].last_reader != kNone &&
        graph_.buffers[b].alias_buffer == kNone && graph_.buffers[b].alias_param == kNone) {
      dying_[buffers_[b].last_reader].push_back(static_cast<Index>(b));
    }
  }
  for (const Item& item : plan_.start_on_host) {
    Place& place = item.kind == ItemKind::State ? params_[item.id].state : params_[item.id].shard;
    if (place == Place::Host) {
      refuse(Property::WellFormed, concat("'", nameOf(graph_, item), "' begins on the host twice"));
    }
    place = Place::Host;
    params_[item.id].host_copy = params_[item.id].host_copy || item.kind == ItemKind::Shard;
    held_ -= deviceBytes(graph_, item);
  }
  for (const Index id : plan_.start_gathered) {
    if (params_[id].copy == ParamState::Ready) {
      refuse(Property::WellFormed, concat("'", param(id), "' begins gathered twice"));
    }
    params_[id].copy = ParamState::Ready;
    held_ += graph_.params[id].bytes;
  }
}

void Verifier::end() {
  at_ = kNone;
  for (std::size_t op = 0; op < ops_.size(); ++op) {
    const bool returns_memory = ops_[op].returns > 0;
    if (returns_memory && !ops_[op].waited) {
      at_ = ops_[op].instruction;
      refuse(Property::CopiedBeforeDropped,
             concat("the ", name(ops_[op].kind), " of '", nameOf(graph_, plan_.items[plan_.instructions[at_].first]),
                    "' is never waited for, its memory never given back"));
    }
  }
  std::vector<char> gathered(params_.size(), 0);
  std::vector<char> host_state(params_.size(), 0);
  std::vector<char> host_shard(params_.size(), 0);
  for (const Index id : plan_.start_gathered) {
    gathered[id] = 1;
  }
  for (const Item& item : plan_.start_on_host) {
    (item.kind == ItemKind::State ? host_state : host_shard)[item.id] = 1;
  }
  for (std::size_t id = 0; id < params_.size() && !violation_; ++id) {
    const ParamState& p = params_[id];
    const std::string which = "'" + graph_.params[id].name + "'";
    if (p.open > 0) {
      refuse(Property::ReducedOnce, concat("the gradient of ", which, " is never reduced"));
    } else if (p.stale) {
      refuse(Property::NeverStale, concat(which, " is updated but not gathered again"));
    } else if ((p.copy != ParamState::Absent) != (gathered[id] != 0)) {
      refuse(Property::SteadyState, concat(which, gathered[id] != 0 ? " begins gathered but does not end so"
                                                                    : " is still gathered at the end"));
    } else if ((p.state != Place::Device) != (host_state[id] != 0) || p.state == Place::Leaving ||
               (p.shard != Place::Device) != (host_shard[id] != 0) || p.shard == Place::Leaving) {
      refuse(Property::SteadyState, concat("the states or the shard of ", which, " do not end where they began"));
    }
  }
}

}  // namespace detail

std::string_view name(Property property) { return kNames[static_cast<std::size_t>(property)]; }

std::optional<Violation> verify(const StepGraph& graph, const Plan& plan) {
  return detail::Verifier(graph, plan).run();
}

std::optional<Violation> verifyRanks(const StepGraph& graph, const std::vector<Plan>& plans) {
  const auto collectives = [](const Plan& plan) {
    std::vector<Index> found;
    for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
      const NodeKind kind = plan.instructions[i].kind;
      if (kind == NodeKind::Gather || kind == NodeKind::Reduce) {
        found.push_back(static_cast<Index>(i));
      }
    }
    return found;
  };
  for (std::size_t rank = 1; rank < plans.size(); ++rank) {
    const Plan& a = plans[0];
    const Plan& b = plans[rank];
    const std::vector<Index> first = collectives(a);
    const std::vector<Index> second = collectives(b);
    for (std::size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
      if (i >= first.size() || i >= second.size()) {
        return Violation{
            Property::SameOnAllRanks, i < second.size() ? second[i] : kNone,
            concat("rank ", rank, " starts ", second.size(), " collectives, rank 0 starts ", first.size())};
      }
      const Instruction& x = a.instructions[first[i]];
      const Instruction& y = b.instructions[second[i]];
      if (x.kind != y.kind || !std::ranges::equal(a.itemsOf(x), b.itemsOf(y))) {
        return Violation{Property::SameOnAllRanks, second[i],
                         concat("collective ", i, ": rank ", rank, " starts a ", name(y.kind), " of '",
                                nameOf(graph, b.items[y.first]), "', rank 0 a ", name(x.kind), " of '",
                                nameOf(graph, a.items[x.first]), "'")};
      }
    }
  }
  return std::nullopt;
}

void requireValid(const StepGraph& graph, const Plan& plan) {
  if (const auto violation = verify(graph, plan)) {
    fail("the plan '", plan.strategy, "' for '", graph.name, "' is refused at instruction ", violation->instruction,
         " (", name(violation->property), "): ", violation->reason);
  }
}

}  // namespace dc::plan
