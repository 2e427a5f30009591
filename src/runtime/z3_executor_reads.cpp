// Reads of parameters by the program, in modules and for what autograd saved: recorded, and following a plan where
// there is one.
#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/z3_executor.h"

namespace dc {

std::int64_t Z3CustomOpExecutor::bytesOf(const Wanted& wanted) const {
  return param_registry_->getParam(wanted.id).numel() * static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
}

void Z3CustomOpExecutor::record(RecordedOp::Kind kind, const Wanted& wanted, bool backward,
                                const Timeline::Mark& start) {
  if (start) {
    context_->recorder->add(kind, wanted.id, wanted.dtype, bytesOf(wanted), backward, start,
                            DSParamRegistry::versionOf(param_registry_->getParam(wanted.id).getDSTensor()));
  }
}

at::Tensor Z3CustomOpExecutor::gatherShard(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool keep,
                                           bool backward, bool traced) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  const Wanted wanted{ds_id, dtype.value_or(param.getDtype())};
  const Timeline::Mark entered = context_->timeline->mark();
  Timeline::Mark mark = context_->recorder->mark();
  const bool planned = followRead({{ds_id, wanted.dtype}, ProgramEvent::Kind::Read, backward}, traced).keep;
  keep = keep || param.isPersistent() || planned;
  const bool found = hasCurrentCopy(wanted);
  if (found) {
    context_->stats.gathers_reused.fetch_add(1, std::memory_order_relaxed);
  } else if (readInPlace(wanted, traced) == nullptr) {
    launch(wanted);
  }
  record(found ? RecordedOp::Kind::Read : RecordedOp::Kind::Gather, wanted, backward, mark);
  mark = context_->recorder->mark();
  GatheredParam& copy = *param_registry_->findGathered(ds_id, wanted.dtype);
  awaitCopy(copy);
  record(RecordedOp::Kind::Wait, wanted, backward, mark);
  at::Tensor tensor = aliasOf(copy.tensor);
  if (!keep) {
    letGo(wanted, traced);
  }
  context_->timeline->add(Timeline::Kind::Take, ds_id, 0, entered);
  return tensor;
}

void Z3CustomOpExecutor::prefetchShards(const std::vector<std::int64_t>& ds_ids,
                                        const std::vector<at::ScalarType>& dtypes, bool backward) {
  if (!ds_ids.empty() && dtypes.size() == ds_ids.size()) {
    const Timeline::Mark mark = context_->recorder->mark();
    followRead({{ds_ids[0], dtypes[0]}, ProgramEvent::Kind::Group, backward});
    prefetchParamsFused(ds_ids, dtypes);
    for (std::size_t i = 0; i < ds_ids.size(); ++i) {
      record(RecordedOp::Kind::Prefetch, {ds_ids[i], dtypes[i]}, backward, mark);
    }
    return;
  }
  prefetchParamsFused(ds_ids, dtypes);
}

void Z3CustomOpExecutor::follow(std::shared_ptr<ScheduleFollower> follower) {
  if (follower_ != nullptr) {
    dropCopies(follower_->abandon());
  }
  follower_ = std::move(follower);
}

void Z3CustomOpExecutor::endCycle() {
  if (follower_ != nullptr && follower_->inCycle()) {
    dropCopies(follower_->end());
  }
}

// Their memory lives on in the tensors that were handed out.
void Z3CustomOpExecutor::dropCopies(const std::vector<CopyKey>& keys) {
  for (const CopyKey& key : keys) {
    letGo({key.id, key.dtype});
  }
}

void Z3CustomOpExecutor::startGathers(const std::vector<std::vector<CopyKey>>& gathers,
                                      std::span<const std::int64_t> params) {
  for (const auto& together : gathers) {
    std::vector<std::int64_t> ids;
    std::vector<at::ScalarType> dtypes;
    for (const CopyKey& key : together) {
      ids.push_back(params.empty() ? key.id : params[static_cast<std::size_t>(key.id)]);
      dtypes.push_back(key.dtype);
    }
    prefetchParamsFused(ids, dtypes);
  }
}

void Z3CustomOpExecutor::beginGraph(std::shared_ptr<const StepSchedule> schedule, std::vector<std::int64_t> params,
                                    std::shared_ptr<StateOffload> states) {
  graph_schedule_ = follower_ == nullptr ? std::move(schedule) : nullptr;
  graph_params_ = std::move(params);
  graph_event_ = 0;
  states_ = std::move(states);
  if (graph_schedule_ != nullptr && !graph_schedule_->empty() &&
      graph_schedule_->front().event.kind == ProgramEvent::Kind::BeginGraph) {
    serve((*graph_schedule_)[graph_event_++]);
  }
}

void Z3CustomOpExecutor::serve(const ScheduledEvent& event) {
  if (states_ != nullptr && !event.moves.empty()) {
    states_->moveLocked(event.moves);
  }
  startGathers(event.gathers, graph_params_);
}

ScheduleFollower::Step Z3CustomOpExecutor::followGraph(const ProgramEvent& event) {
  if (graph_event_ == graph_schedule_->size()) {
    graph_schedule_ = nullptr;  // the graph has run; the program reads on its own
    return {};
  }
  const ScheduledEvent& next = (*graph_schedule_)[graph_event_];
  const std::int64_t id = graph_params_[static_cast<std::size_t>(next.event.key.id)];
  if (id != event.key.id || next.event.key.dtype != event.key.dtype) {
    // Compiled code reads in the order that its schedule was made for, on all ranks alike: there is no other.
    const std::string expected = param_registry_->getParam(id).describe();
    graph_schedule_ = nullptr;
    fail("a compiled graph reads ", param_registry_->getParam(event.key.id).describe(), " where its schedule has ",
         expected, " (graph ", graph_id_, ", ", place(), "); please report this, with the model");
  }
  ++graph_event_;
  serve(next);
  ScheduleFollower::Step step;
  step.followed = true;
  step.keep = next.keep;
  return step;
}

ScheduleFollower::Step Z3CustomOpExecutor::followRead(const ProgramEvent& event, bool traced) {
  if (follower_ == nullptr) [[likely]] {
    return traced && graph_schedule_ != nullptr ? followGraph(event) : ScheduleFollower::Step();
  }
  if (!follower_->inCycle()) {
    std::unordered_set<std::int64_t> current;
    for (const std::int64_t id : follower_->persistent()) {
      for (const GatheredParam& copy : param_registry_->gatheredCopies(id)) {
        if (!copy.let_go && param_registry_->isCurrent(id, copy)) {
          current.insert(id);
        }
      }
    }
    follower_->begin(std::move(current));
  }
  ScheduleFollower::Step step = follower_->next(event);
  dropCopies(step.drop);
  startGathers(step.gathers, {});
  return step;
}

void Z3CustomOpExecutor::letGo(const Wanted& wanted, bool traced) {
  int& holders = param_registry_->holders(wanted.id);
  if (held_.erase(wanted.id)) {
    --holders;
  }
  if (holders > 0) {
    return;  // another graph means to read it
  }
  GatheredParam* const copy = param_registry_->findGathered(wanted.id, wanted.dtype);
  // A recording says until when the tensors that were handed out lived.
  if (traced && copy != nullptr && copy->in_place && in_place_.holding() && !context_->recorder->recording()) {
    copy->let_go = true;
    return;
  }
  forgetCopy(wanted);
}

void Z3CustomOpExecutor::forgetCopy(const Wanted& wanted) {
  auto& copies = param_registry_->gatheredCopies(wanted.id);
  copies.erase(std::remove_if(copies.begin(), copies.end(),
                              [&](const GatheredParam& copy) { return copy.tensor.scalar_type() == wanted.dtype; }),
               copies.end());
}

at::Tensor Z3CustomOpExecutor::gatherAgain(const GatherKey& key) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(key.generation == context_->generation, [&] {
    return concat("a backward needs parameter id ", key.id, " of graph ", key.graph_id,
                  " from a runtime that was cleaned up since its forward (", place(), ")");
  });
  const DSParam& param = member(key.id);
  const std::uint32_t version = DSParamRegistry::versionOf(param.getDSTensor());
  check(version == key.version, [&] {
    return concat(param.describe(),
                  " was changed between the forward and the backward that needs it (its shard's version went "
                  "from ",
                  key.version, " to ", version, "); run the backward before the update (", place(), ")");
  });
  const Wanted wanted{key.id, key.dtype};
  const Timeline::Mark entered = context_->timeline->mark();
  Timeline::Mark mark = context_->recorder->mark();
  const ScheduleFollower::Step step = followRead({{key.id, key.dtype}, ProgramEvent::Kind::Read, /*backward=*/true});
  at::Tensor tensor;
  const bool found = hasCurrentCopy(wanted);
  if (!found && step.keep) {
    launch(wanted);
  }
  if (found || step.keep) {
    record(found ? RecordedOp::Kind::Read : RecordedOp::Kind::Gather, wanted, true, mark);
    mark = context_->recorder->mark();
    GatheredParam& copy = *param_registry_->findGathered(key.id, key.dtype);
    awaitCopy(copy);
    tensor = aliasOf(copy.tensor);
    if (step.followed && !step.keep && !param.isPersistent()) {
      letGo(wanted);
    }
  } else {
    context_->stats.gathers_in_backward.fetch_add(1, std::memory_order_relaxed);
    const Launched launched = prepare(wanted);
    const Event ready = start({&wanted, 1}, {&launched, 1});
    record(RecordedOp::Kind::Gather, wanted, true, mark);
    mark = context_->recorder->mark();
    context_->await(ready);
    setFreeAfter(launched.tensor, Event());  // the caller is ordered after it, on the stream that the memory is of
    tensor = launched.tensor;
  }
  record(RecordedOp::Kind::Wait, wanted, true, mark);
  context_->timeline->add(Timeline::Kind::Take, key.id, 0, entered);
  return tensor;
}

}  // namespace dc
