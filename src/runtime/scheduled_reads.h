// What the schedule has for the program's reads: that of the whole step, which a follower knows, or else that of the
// compiled graph that runs.
//
// Guarded by the runtime's lock. Knows no tensor; the gatherer does what it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "deepcompile/runtime/follower.h"
#include "deepcompile/runtime/state_offload.h"
#include "deepcompile/runtime/step_schedule.h"

namespace dc {

class ScheduledReads {
 public:
  using Step = ScheduleFollower::Step;

  // `name_of`: a parameter, for messages; `where`: the graph and the rank.
  ScheduledReads(ScheduleFollower::NameOf name_of, std::string where)
      : name_of_(std::move(name_of)), where_(std::move(where)) {}

  // From now on reads follow `follower` (null: none). A cycle that is open is given up; returns the copies to drop.
  std::vector<CopyKey> follow(std::shared_ptr<ScheduleFollower> follower);
  const std::shared_ptr<ScheduleFollower>& follower() const { return follower_; }
  // Ends a cycle that no backward has ended; returns the copies to drop.
  std::vector<CopyKey> endCycle();

  // A compiled graph begins to run. Its reads follow `schedule` (null: none) unless there is a follower. The schedule's
  // numbers stand for these `params`: equal layers may share a graph. `states` moves what the schedule moves. Returns
  // what is to be done before the graph's first read.
  Step beginGraph(std::shared_ptr<const StepSchedule> schedule, std::vector<std::int64_t> params,
                  std::shared_ptr<StateOffload> states);
  // The graph has failed, or was not run to its end.
  void endGraph() { schedule_ = nullptr; }

  // Nothing is to be done at reads; `traced`: of compiled code.
  bool idle(bool traced) const { return follower_ == nullptr && (!traced || schedule_ == nullptr); }
  // What is to be done at this event. `current`: whom of the follower's persistent parameters need no gather.
  Step at(const ProgramEvent& event, const std::function<bool(std::int64_t)>& current);

 private:
  Step atRead(const ProgramEvent& event);
  // Moves the states, and says what to gather.
  Step serve(const ScheduledEvent& event);

  const ScheduleFollower::NameOf name_of_;
  const std::string where_;
  std::shared_ptr<ScheduleFollower> follower_;
  std::shared_ptr<const StepSchedule> schedule_;  // of the compiled graph that runs, until its last event
  std::vector<std::int64_t> params_;              // whom its numbers stand for
  std::size_t next_ = 0;                          // event
  std::shared_ptr<StateOffload> states_;
};

}  // namespace dc
