// What each instruction does to the verifier's books, and what it must find there.
#include <algorithm>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/verifier_books.h"

namespace dc::plan::detail {

void Verifier::step(const Instruction& in) {
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

void Verifier::gather(Index id, Index op) {
  ParamState& p = params_[id];
  if (p.shard == Place::Leaving || p.shard == Place::Host) {
    refuse(Property::OnDeviceWhenUsed, concat("'", param(id), "' is gathered while its shard is on the host"));
  } else if (graph_.stage < 3) {
    if (!p.stale) {
      refuse(Property::GatheredBeforeUse,
             concat("'", param(id), "' is gathered before its update; it would be left out of date"));
    }
    p.stale = false;
  } else if (p.copy != ParamState::Absent) {
    refuse(Property::WellFormed, concat("'", param(id), "' is gathered although it is already gathered"));
  } else if (graph_.params[id].persistent && p.gathers > 0) {
    refuse(Property::PersistentOnce, concat("'", param(id), "' is persistent and gathered a second time"));
  } else {
    p.copy = ParamState::Flying;
    p.gather_op = op;
    ++p.gathers;
    held_ += graph_.params[id].bytes;
  }
}

void Verifier::release(const Item& item) {
  ParamState& p = params_[item.id];
  if (item.kind == ItemKind::Shard) {
    if (p.shard != Place::Device || p.copy == ParamState::Flying) {
      refuse(Property::CopiedBeforeDropped, concat("the shard of '", param(item.id), "' is dropped while it moves"));
    } else if (!p.host_copy) {
      refuse(Property::CopiedBeforeDropped,
             concat("the shard of '", param(item.id), "' is dropped but the host has no current copy"));
    }
    p.shard = Place::Host;
    held_ -= graph_.params[item.id].shard;
    return;
  }
  if (p.copy == ParamState::Flying) {
    refuse(Property::WaitedBeforeRead, concat("'", param(item.id), "' is released while it is being gathered"));
  } else if (p.copy == ParamState::Absent || graph_.stage < 3) {
    refuse(Property::GatheredBeforeUse, concat("'", param(item.id), "' is released but not gathered"));
  }
  p.copy = ParamState::Absent;
  p.released_at = at_;
  held_ -= graph_.params[item.id].bytes;
}

void Verifier::reduce(Index id, Index op) {
  ParamState& p = params_[id];
  if (p.open == 0) {
    refuse(Property::ReducedOnce, concat("'", param(id),
                                         "' has no gradient to reduce here: it was reduced already "
                                         "or not computed yet"));
  } else if (graph_.stage == 1 && p.contributed < p.contributions) {
    refuse(Property::ReducedOnce,
           concat("'", param(id), "' is reduced before its last micro-batch; ZeRO-1 reduces once a step"));
  }
  p.open = 0;
  ++p.flying_reductions;
  ops_[op].returns += graph_.stage == 1 ? 0 : graph_.params[id].grad;
}

void Verifier::offload(const Item& item, Index op) {
  const auto leave = [&](Place& place, Index& by) {
    if (place != Place::Device) {
      refuse(Property::CopiedBeforeDropped, concat("'", nameOf(graph_, item), "' is offloaded but not on the device"));
    }
    place = Place::Leaving;
    by = op;
  };
  if (item.kind == ItemKind::Buffer) {
    BufferState& b = buffers_[item.id];
    const Buffer& buffer = graph_.buffers[item.id];
    if (buffer.alias_param != kNone || buffer.input || buffer.gradient) {
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

void Verifier::reload(const Item& item, Index op) {
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

void Verifier::wait(Index id) {
  OpState& op = ops_[id];
  op.waited = true;
  held_ -= op.returns;
  op.returns = 0;
  for (const Item& item : plan_.itemsOf(plan_.instructions[op.instruction])) {
    const auto arrive = [&](Place& place, Index by) {
      if (by == id) {
        place = place == Place::Leaving ? Place::Host : place == Place::Coming ? Place::Device : place;
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

void Verifier::use(Index n, Index id, Index view) {
  const ParamState& p = params_[id];
  const std::string by = view == kNone ? "" : concat(" through the view '", graph_.buffers[view].name, "'");
  if (graph_.stage < 3) {
    if (p.stale) {
      refuse(Property::NeverStale, concat("node '", node(n), "' uses '", param(id), "' after its update", by,
                                          " before it is gathered again"));
    }
  } else if (p.copy == ParamState::Flying) {
    refuse(view == kNone ? Property::WaitedBeforeRead : Property::AliasesRespected,
           concat("node '", node(n), "' reads '", param(id), "'", by, " while it is being gathered"));
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

bool Verifier::needsBuffer(Index n, Index buffer) {
  const Index base = root(buffer);
  if (graph_.buffers[base].alias_param != kNone) {
    use(n, graph_.buffers[base].alias_param, buffer);
    return !violation_;
  }
  const BufferState& b = buffers_[base];
  const std::string which = concat("'", graph_.buffers[buffer].name, "'",
                                   base == buffer ? "" : concat(", a view of '", graph_.buffers[base].name, "',"));
  if (!b.made) {
    return refuse(Property::DependenciesFirst, concat("node '", node(n), "' reads ", which, " before it is made"));
  }
  if (b.place != Place::Device) {
    return refuse(base == buffer ? Property::OnDeviceWhenUsed : Property::AliasesRespected,
                  concat("node '", node(n), "' reads ", which, " which is not on the device"));
  }
  return true;
}

void Verifier::runNode(Index n) {
  const Node& it = graph_.nodes[n];
  if (ran_[n] != 0) {
    refuse(Property::EveryNodeOnce, concat("node '", it.name, "' runs twice"));
    return;
  }
  ran_[n] = 1;
  // The order of the graph is the order of execution: memory that a node is the last to read is
  // free after it.
  if (n != next_) {
    refuse(Property::DependenciesFirst, concat("node '", it.name, "' runs where '", node(next_), "' is due"));
  }
  ++next_;
  for (const Index source : it.after) {
    if (ran_[source] == 0) {
      refuse(Property::DependenciesFirst, concat("node '", it.name, "' runs before '", node(source), "'"));
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
      refuse(Property::ReducedOnce, concat("node '", it.name, "' makes a gradient of '", param(id),
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
      refuse(Property::OnDeviceWhenUsed, concat("buffer '", graph_.buffers[b].name, "' dies at node '", it.name,
                                                "' while it is not on the device"));
    }
    buffers_[b].place = Place::Nowhere;
    held_ -= graph_.buffers[b].bytes;
  }
}

void Verifier::update(Index n, Index id) {
  ParamState& p = params_[id];
  if (p.open > 0 || p.contributed < p.contributions) {
    refuse(Property::ReducedOnce,
           concat("node '", node(n), "' updates '", param(id), "' before all its gradients are reduced"));
  } else if (p.flying_reductions > 0) {
    refuse(Property::ReducedBeforeUpdate,
           concat("node '", node(n), "' updates '", param(id), "' while its gradient is being reduced"));
  } else if (p.state != Place::Device || p.shard != Place::Device) {
    refuse(Property::OnDeviceWhenUsed,
           concat("node '", node(n), "' updates '", param(id), "' while its ",
                  p.state != Place::Device ? "states are" : "shard is", " not on the device"));
  } else if (graph_.stage == 3 && p.copy != ParamState::Absent) {
    refuse(Property::NeverStale,
           concat("node '", node(n), "' updates '", param(id), "' while a gathered copy is held, which becomes stale"));
  }
  p.host_copy = false;
  p.stale = graph_.stage < 3;
}

}  // namespace dc::plan::detail
