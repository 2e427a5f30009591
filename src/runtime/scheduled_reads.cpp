#include "deepcompile/runtime/scheduled_reads.h"

#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {

std::vector<CopyKey> ScheduledReads::follow(std::shared_ptr<ScheduleFollower> follower) {
  std::vector<CopyKey> dropped = follower_ != nullptr ? follower_->abandon() : std::vector<CopyKey>();
  follower_ = std::move(follower);
  return dropped;
}

std::vector<CopyKey> ScheduledReads::endCycle() {
  return follower_ != nullptr && follower_->inCycle() ? follower_->end() : std::vector<CopyKey>();
}

ScheduledReads::Step ScheduledReads::beginGraph(std::shared_ptr<const StepSchedule> schedule,
                                                std::vector<std::int64_t> params,
                                                std::shared_ptr<StateOffload> states) {
  schedule_ = follower_ == nullptr ? std::move(schedule) : nullptr;
  params_ = std::move(params);
  next_ = 0;
  states_ = std::move(states);
  const bool begins =
      schedule_ != nullptr && !schedule_->empty() && schedule_->front().event.kind == ProgramEvent::Kind::BeginGraph;
  return begins ? serve((*schedule_)[next_++]) : Step();
}

ScheduledReads::Step ScheduledReads::serve(const ScheduledEvent& event) {
  if (states_ != nullptr && !event.moves.empty()) {
    states_->moveLocked(event.moves);
  }
  Step step;
  step.followed = true;
  step.keep = event.keep;
  step.gathers = event.gathers;
  for (auto& together : step.gathers) {
    for (CopyKey& key : together) {
      key.id = params_[static_cast<std::size_t>(key.id)];
    }
  }
  return step;
}

ScheduledReads::Step ScheduledReads::atRead(const ProgramEvent& event) {
  if (next_ == schedule_->size()) {
    schedule_ = nullptr;  // the graph has run; the program reads on its own
    return {};
  }
  const ScheduledEvent& next = (*schedule_)[next_];
  const std::int64_t id = params_[static_cast<std::size_t>(next.event.key.id)];
  if (id != event.key.id || next.event.key.dtype != event.key.dtype) {
    // Compiled code always reads in the order that its schedule was made for, so a difference is an error.
    schedule_ = nullptr;
    fail("a compiled graph reads ", name_of_(event.key.id), " where its schedule has ", name_of_(id), " (", where_,
         "); please report this, with the model");
  }
  ++next_;
  return serve(next);
}

ScheduledReads::Step ScheduledReads::at(const ProgramEvent& event, const std::function<bool(std::int64_t)>& current) {
  if (follower_ == nullptr) {
    return atRead(event);
  }
  if (!follower_->inCycle()) {
    std::unordered_set<std::int64_t> settled;
    for (const std::int64_t id : follower_->persistent()) {
      if (current(id)) {
        settled.insert(id);
      }
    }
    follower_->begin(std::move(settled));
  }
  return follower_->next(event);
}

}  // namespace dc
