#include "deepcompile/plan/verifier.h"

#include <algorithm>
#include <array>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

constexpr std::array<std::string_view, 16> kNames = {
    "well formed",           "every node once",     "dependencies first",    "gathered before use",
    "waited before read",    "kept until last use", "aliases respected",     "never stale",
    "persistent once",       "reduced once",        "reduced before update", "on device when used",
    "copied before dropped", "steady state",        "within budget",         "same on all ranks"};

enum class Place : std::uint8_t { Device, Leaving, Host, Coming, Nowhere };

// What is known of one parameter at one point of the plan.
struct ParamState {
  enum Copy : std::uint8_t { Absent, Flying, Ready } copy = Absent;
  Index gather_op = kNone;
  Index released_at = kNone;
  int gathers = 0;
  bool stale = false;  // ZeRO-1 and 2: updated, and not gathered again yet
  int open = 0;        // contributions that no reduction has taken
  Index open_micro = kNone;
  int contributed = 0;
  int contributions = 0;  // in the whole step
  int flying_reductions = 0;
  Place shard = Place::Device;
  Place state = Place::Device;
  Index shard_op = kNone;
  Index state_op = kNone;
  bool host_copy = false;  // the host holds the current shard
};

struct BufferState {
  Place place = Place::Nowhere;
  Index op = kNone;
  Index last_reader = kNone;  // slot
  bool made = false;
};

struct OpState {
  NodeKind kind = NodeKind::Compute;
  Index instruction = kNone;
  bool waited = false;
  Bytes returns = 0;  // bytes that its wait gives back
};

class Verifier {
 public:
  Verifier(const StepGraph& graph, const Plan& plan) : graph_(graph), plan_(plan) {}

  std::optional<Violation> run() {
    if (!wellFormed()) {
      return violation_;
    }
    begin();
    for (std::size_t i = 0; i < plan_.instructions.size() && !violation_; ++i) {
      at_ = static_cast<Index>(i);
      step(plan_.instructions[i]);
      if (!violation_ && peak_ > plan_.budget) {
        refuse(Property::WithinBudget,
               concat("needs ", peak_, " bytes at ", describe(plan_.instructions[i]),
                      ", the budget is ", plan_.budget));
      }
    }
    if (!violation_) {
      end();
    }
    return violation_;
  }

 private:
  bool refuse(Property property, const std::string& reason) {
    if (!violation_) {
      violation_ = Violation{property, at_, reason};
    }
    return false;
  }

  const std::string& param(Index id) const { return graph_.params[id].name; }
  const std::string& node(Index id) const { return graph_.nodes[id].name; }

  std::string describe(const Instruction& instruction) const {
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

  Index root(Index buffer) const {
    while (graph_.buffers[buffer].alias_buffer != kNone) {
      buffer = graph_.buffers[buffer].alias_buffer;
    }
    return buffer;
  }

  bool itemExists(const Item& item) const {
    const std::size_t count =
        item.kind == ItemKind::Buffer ? graph_.buffers.size() : graph_.params.size();
    return item.id >= 0 && static_cast<std::size_t>(item.id) < count;
  }

  bool wellFormed() {
    std::vector<char> started(static_cast<std::size_t>(std::max<Index>(plan_.ops, 0)), 0);
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      at_ = static_cast<Index>(i);
      const Instruction& in = plan_.instructions[i];
      const bool runs_node = in.kind == NodeKind::Compute || in.kind == NodeKind::Optimizer;
      const bool has_op = !runs_node && in.kind != NodeKind::Release;
      if (runs_node) {
        if (in.node < 0 || static_cast<std::size_t>(in.node) >= graph_.nodes.size() ||
            graph_.nodes[in.node].kind != in.kind) {
          return refuse(Property::WellFormed,
                        concat("node ", in.node, " does not exist or is of another kind"));
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
                               started[in.op] == 0 ? ", which has not been started"
                                                   : ", which was already waited for"));
        }
        started[in.op] = 2;
        continue;
      }
      if (has_op && started[in.op]++ != 0) {
        return refuse(Property::WellFormed, concat("operation ", in.op, " is started twice"));
      }
      if (in.first < 0 || in.count < 1 ||
          static_cast<std::size_t>(in.first) + in.count > plan_.items.size()) {
        return refuse(Property::WellFormed, "an instruction without items");
      }
      for (const Item& item : plan_.itemsOf(in)) {
        const bool moves = in.kind == NodeKind::Offload || in.kind == NodeKind::Reload;
        const bool fits = moves ? item.kind != ItemKind::Param
                                : item.kind == ItemKind::Param || (in.kind == NodeKind::Release &&
                                                                   item.kind == ItemKind::Shard);
        if (!fits || !itemExists(item) ||
            (item.kind == ItemKind::Buffer && graph_.buffers[item.id].alias_buffer != kNone)) {
          return refuse(Property::WellFormed,
                        concat("a ", name(in.kind), " of something that it cannot work on"));
        }
      }
    }
    at_ = kNone;
    for (const Item& item : plan_.start_on_host) {
      if (!itemExists(item) || (item.kind != ItemKind::State && item.kind != ItemKind::Shard)) {
        return refuse(Property::WellFormed,
                      "the step begins with something on the host that cannot be there");
      }
    }
    for (const Index id : plan_.start_gathered) {
      if (id < 0 || static_cast<std::size_t>(id) >= graph_.params.size() ||
          !graph_.params[id].frozen) {
        return refuse(Property::NeverStale,
                      "the step begins with a gathered parameter that is not frozen");
      }
    }
    return true;
  }

  void begin() {
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
        refuse(Property::WellFormed,
               concat("'", nameOf(graph_, item), "' begins on the host twice"));
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

  void step(const Instruction& in) {
    peak_ = held_;
    switch (in.kind) {
      case NodeKind::Compute:
      case NodeKind::Optimizer:
        runNode(in.node);
        return;
      case NodeKind::Wait:
        wait(in.op);
        break;
      default:
        if (in.op != kNone) {
          ops_[in.op].kind = in.kind;
          ops_[in.op].instruction = at_;
        }
        for (const Item& item : plan_.itemsOf(in)) {
          if (violation_) {
            return;
          }
          switch (in.kind) {
            case NodeKind::Gather:
              gather(item.id, in.op);
              break;
            case NodeKind::Release:
              release(item);
              break;
            case NodeKind::Reduce:
              reduce(item.id, in.op);
              break;
            case NodeKind::Offload:
              offload(item, in.op);
              break;
            default:
              reload(item, in.op);
              break;
          }
        }
    }
    peak_ = std::max(peak_, held_);
  }

  void gather(Index id, Index op) {
    ParamState& p = params_[id];
    if (p.shard == Place::Leaving || p.shard == Place::Host) {
      refuse(Property::OnDeviceWhenUsed,
             concat("'", param(id), "' is gathered while its shard is on the host"));
    } else if (graph_.stage < 3) {
      if (!p.stale) {
        refuse(Property::GatheredBeforeUse,
               concat("'", param(id),
                      "' is gathered before its update; it would be left out of date"));
      }
      p.stale = false;
    } else if (p.copy != ParamState::Absent) {
      refuse(Property::WellFormed,
             concat("'", param(id), "' is gathered although it is already gathered"));
    } else if (graph_.params[id].persistent && p.gathers > 0) {
      refuse(Property::PersistentOnce,
             concat("'", param(id), "' is persistent and gathered a second time"));
    } else {
      p.copy = ParamState::Flying;
      p.gather_op = op;
      ++p.gathers;
      held_ += graph_.params[id].bytes;
    }
  }

  void release(const Item& item) {
    ParamState& p = params_[item.id];
    if (item.kind == ItemKind::Shard) {
      if (p.shard != Place::Device || p.copy == ParamState::Flying) {
        refuse(Property::CopiedBeforeDropped,
               concat("the shard of '", param(item.id), "' is dropped while it moves"));
      } else if (!p.host_copy) {
        refuse(Property::CopiedBeforeDropped,
               concat("the shard of '", param(item.id),
                      "' is dropped but the host has no current copy"));
      }
      p.shard = Place::Host;
      held_ -= graph_.params[item.id].shard;
      return;
    }
    if (p.copy == ParamState::Flying) {
      refuse(Property::WaitedBeforeRead,
             concat("'", param(item.id), "' is released while it is being gathered"));
    } else if (p.copy == ParamState::Absent || graph_.stage < 3) {
      refuse(Property::GatheredBeforeUse,
             concat("'", param(item.id), "' is released but not gathered"));
    }
    p.copy = ParamState::Absent;
    p.released_at = at_;
    held_ -= graph_.params[item.id].bytes;
  }

  void reduce(Index id, Index op) {
    ParamState& p = params_[id];
    if (p.open == 0) {
      refuse(Property::ReducedOnce,
             concat("'", param(id),
                    "' has no gradient to reduce here: it was reduced already "
                    "or not computed yet"));
    } else if (graph_.stage == 1 && p.contributed < p.contributions) {
      refuse(Property::ReducedOnce,
             concat("'", param(id),
                    "' is reduced before its last micro-batch; ZeRO-1 reduces once a step"));
    }
    p.open = 0;
    ++p.flying_reductions;
    ops_[op].returns += graph_.stage == 1 ? 0 : graph_.params[id].grad;
  }

  void offload(const Item& item, Index op) {
    const auto leave = [&](Place& place, Index& by) {
      if (place != Place::Device) {
        refuse(Property::CopiedBeforeDropped,
               concat("'", nameOf(graph_, item), "' is offloaded but not on the device"));
      }
      place = Place::Leaving;
      by = op;
    };
    if (item.kind == ItemKind::Buffer) {
      BufferState& b = buffers_[item.id];
      if (graph_.buffers[item.id].alias_param != kNone || graph_.buffers[item.id].input) {
        refuse(Property::WellFormed, concat("'", nameOf(graph_, item), "' cannot be offloaded"));
      }
      leave(b.place, b.op);
    } else {
      ParamState& p = params_[item.id];
      const bool state = item.kind == ItemKind::State;
      leave(state ? p.state : p.shard, state ? p.state_op : p.shard_op);
    }
    ops_[op].returns += deviceBytes(graph_, item);
  }

  void reload(const Item& item, Index op) {
    const auto come = [&](Place& place, Index& by) {
      if (place != Place::Host) {
        refuse(Property::CopiedBeforeDropped,
               concat("'", nameOf(graph_, item), "' is reloaded but is not (yet) on the host"));
      }
      place = Place::Coming;
      by = op;
    };
    if (item.kind == ItemKind::Buffer) {
      come(buffers_[item.id].place, buffers_[item.id].op);
    } else {
      ParamState& p = params_[item.id];
      const bool state = item.kind == ItemKind::State;
      come(state ? p.state : p.shard, state ? p.state_op : p.shard_op);
    }
    held_ += deviceBytes(graph_, item);
  }

  void wait(Index id) {
    OpState& op = ops_[id];
    op.waited = true;
    held_ -= op.returns;
    op.returns = 0;
    for (const Item& item : plan_.itemsOf(plan_.instructions[op.instruction])) {
      const auto arrive = [&](Place& place, Index by) {
        if (by == id) {
          place = place == Place::Leaving  ? Place::Host
                  : place == Place::Coming ? Place::Device
                                           : place;
        }
      };
      if (item.kind == ItemKind::Buffer) {
        arrive(buffers_[item.id].place, buffers_[item.id].op);
      } else if (item.kind == ItemKind::State) {
        arrive(params_[item.id].state, params_[item.id].state_op);
      } else if (item.kind == ItemKind::Shard) {
        ParamState& p = params_[item.id];
        arrive(p.shard, p.shard_op);
        p.host_copy = p.host_copy || (op.kind == NodeKind::Offload && p.shard_op == id);
      } else if (op.kind == NodeKind::Gather && graph_.stage == 3) {
        ParamState& p = params_[item.id];
        if (p.copy == ParamState::Flying && p.gather_op == id) {
          p.copy = ParamState::Ready;
        }
      } else if (op.kind == NodeKind::Reduce) {
        --params_[item.id].flying_reductions;
      }
    }
  }

  void use(Index n, Index id, Index view) {
    const ParamState& p = params_[id];
    const std::string by =
        view == kNone ? "" : concat(" through the view '", graph_.buffers[view].name, "'");
    if (graph_.stage < 3) {
      if (p.stale) {
        refuse(Property::NeverStale,
               concat("node '", node(n), "' uses '", param(id), "' after its update", by,
                      " before it is gathered again"));
      }
    } else if (p.copy == ParamState::Flying) {
      refuse(view == kNone ? Property::WaitedBeforeRead : Property::AliasesRespected,
             concat("node '", node(n), "' reads '", param(id), "'", by,
                    " while it is being gathered"));
    } else if (p.copy == ParamState::Absent) {
      const bool released = p.released_at != kNone;
      refuse(view != kNone ? Property::AliasesRespected
             : released    ? Property::KeptUntilLastUse
                           : Property::GatheredBeforeUse,
             concat("node '", node(n), "' uses '", param(id), "'", by,
                    released ? concat(", which instruction ", p.released_at, " released")
                             : std::string(", which is not gathered")));
    }
  }

  bool needsBuffer(Index n, Index buffer) {
    const Index base = root(buffer);
    if (graph_.buffers[base].alias_param != kNone) {
      use(n, graph_.buffers[base].alias_param, buffer);
      return !violation_;
    }
    const BufferState& b = buffers_[base];
    const std::string which =
        concat("'", graph_.buffers[buffer].name, "'",
               base == buffer ? "" : concat(", a view of '", graph_.buffers[base].name, "',"));
    if (!b.made) {
      return refuse(Property::DependenciesFirst,
                    concat("node '", node(n), "' reads ", which, " before it is made"));
    }
    if (b.place != Place::Device) {
      return refuse(base == buffer ? Property::OnDeviceWhenUsed : Property::AliasesRespected,
                    concat("node '", node(n), "' reads ", which, " which is not on the device"));
    }
    return true;
  }

  void runNode(Index n) {
    const Node& it = graph_.nodes[n];
    if (ran_[n] != 0) {
      refuse(Property::EveryNodeOnce, concat("node '", it.name, "' runs twice"));
      return;
    }
    ran_[n] = 1;
    // The order of the graph is the order of execution: memory that a node is the last to read is
    // free after it.
    if (n != next_) {
      refuse(Property::DependenciesFirst,
             concat("node '", it.name, "' runs where '", node(next_), "' is due"));
    }
    ++next_;
    for (const Index source : it.after) {
      if (ran_[source] == 0) {
        refuse(Property::DependenciesFirst,
               concat("node '", it.name, "' runs before '", node(source), "'"));
      }
    }
    for (const Index id : it.uses) {
      use(n, id, kNone);
    }
    for (const Index b : it.reads) {
      if (violation_ || !needsBuffer(n, b)) {
        return;
      }
    }
    Bytes transient = it.workspace;
    for (const Index b : it.makes) {
      buffers_[b].made = true;
      buffers_[b].place = Place::Device;
      held_ += graph_.buffers[b].bytes;
    }
    for (const Index id : it.grads) {
      ParamState& p = params_[id];
      if (p.open > 0 && p.open_micro != it.micro && graph_.stage > 1) {
        refuse(Property::ReducedOnce,
               concat("node '", it.name, "' makes a gradient of '", param(id),
                      "' while that of micro-batch ", p.open_micro, " is not reduced"));
      }
      if (graph_.stage == 1) {
        transient += graph_.params[id].grad;
      } else if (p.open == 0) {
        held_ += graph_.params[id].grad;
      }
      ++p.open;
      ++p.contributed;
      p.open_micro = it.micro;
    }
    for (const Index id : it.updates) {
      update(n, id);
    }
    peak_ = std::max(peak_, held_ + transient);
    for (const Index b : dying_[n]) {
      if (buffers_[b].place != Place::Device) {
        refuse(Property::OnDeviceWhenUsed,
               concat("buffer '", graph_.buffers[b].name, "' dies at node '", it.name,
                      "' while it is not on the device"));
      }
      buffers_[b].place = Place::Nowhere;
      held_ -= graph_.buffers[b].bytes;
    }
  }

  void update(Index n, Index id) {
    ParamState& p = params_[id];
    if (p.open > 0 || p.contributed < p.contributions) {
      refuse(Property::ReducedOnce, concat("node '", node(n), "' updates '", param(id),
                                           "' before all its gradients are reduced"));
    } else if (p.flying_reductions > 0) {
      refuse(Property::ReducedBeforeUpdate, concat("node '", node(n), "' updates '", param(id),
                                                   "' while its gradient is being reduced"));
    } else if (p.state != Place::Device || p.shard != Place::Device) {
      refuse(Property::OnDeviceWhenUsed,
             concat("node '", node(n), "' updates '", param(id), "' while its ",
                    p.state != Place::Device ? "states are" : "shard is", " not on the device"));
    } else if (graph_.stage == 3 && p.copy != ParamState::Absent) {
      refuse(Property::NeverStale, concat("node '", node(n), "' updates '", param(id),
                                          "' while a gathered copy is held, which becomes stale"));
    }
    p.host_copy = false;
    p.stale = graph_.stage < 3;
  }

  void end() {
    at_ = kNone;
    for (std::size_t op = 0; op < ops_.size(); ++op) {
      const bool returns_memory = ops_[op].returns > 0;
      if (returns_memory && !ops_[op].waited) {
        at_ = ops_[op].instruction;
        refuse(Property::CopiedBeforeDropped,
               concat("the ", name(ops_[op].kind), " of '",
                      nameOf(graph_, plan_.items[plan_.instructions[at_].first]),
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
        refuse(Property::SteadyState,
               concat(which, gathered[id] != 0 ? " begins gathered but does not end so"
                                               : " is still gathered at the end"));
      } else if ((p.state != Place::Device) != (host_state[id] != 0) || p.state == Place::Leaving ||
                 (p.shard != Place::Device) != (host_shard[id] != 0) || p.shard == Place::Leaving) {
        refuse(Property::SteadyState,
               concat("the states or the shard of ", which, " do not end where they began"));
      }
    }
  }

  const StepGraph& graph_;
  const Plan& plan_;
  std::vector<ParamState> params_;
  std::vector<BufferState> buffers_;
  std::vector<OpState> ops_;
  std::vector<char> ran_;
  std::vector<Index> maker_;
  std::vector<std::vector<Index>> dying_;  // slot -> buffers that nobody reads after it
  Bytes held_ = 0;
  Bytes peak_ = 0;
  Index next_ = 0;
  Index at_ = kNone;
  std::optional<Violation> violation_;
};

}  // namespace

std::string_view name(Property property) { return kNames[static_cast<std::size_t>(property)]; }

std::optional<Violation> verify(const StepGraph& graph, const Plan& plan) {
  return Verifier(graph, plan).run();
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
        return Violation{Property::SameOnAllRanks, i < second.size() ? second[i] : kNone,
                         concat("rank ", rank, " starts ", second.size(),
                                " collectives, rank 0 starts ", first.size())};
      }
      const Instruction& x = a.instructions[first[i]];
      const Instruction& y = b.instructions[second[i]];
      if (x.kind != y.kind || !std::ranges::equal(a.itemsOf(x), b.itemsOf(y))) {
        return Violation{Property::SameOnAllRanks, second[i],
                         concat("collective ", i, ": rank ", rank, " starts a ", name(y.kind),
                                " of '", nameOf(graph, b.items[y.first]), "', rank 0 a ",
                                name(x.kind), " of '", nameOf(graph, a.items[x.first]), "'")};
      }
    }
  }
  return std::nullopt;
}

void requireValid(const StepGraph& graph, const Plan& plan) {
  if (const auto violation = verify(graph, plan)) {
    fail("the plan '", plan.strategy, "' for '", graph.name, "' is refused at instruction ",
         violation->instruction, " (", name(violation->property), "): ", violation->reason);
  }
}

}  // namespace dc::plan
