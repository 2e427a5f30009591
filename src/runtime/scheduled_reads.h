// Looks up what to do at the program's reads: in the schedule of the whole step, if there is a follower, else in the
// schedule of the running compiled graph.
//
// Guarded by the runtime's lock. It handles no tensors; the gatherer carries out the result.
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

  // `name_of` names a parameter; `where`: the graph and the rank, for messages.
  ScheduledReads(ScheduleFollower::NameOf name_of, std::string where)
      : name_of_(std::move(name_of)), where_(std::move(where)) {}

  // From now on reads follow `follower` (null: none). Abandons an open cycle; returns the copies to drop.
  std::vector<CopyKey> follow(std::shared_ptr<ScheduleFollower> follower);
  const std::shared_ptr<ScheduleFollower>& follower() const { return follower_; }
  // Ends a cycle that did not end with a backward; returns the copies to drop.
  std::vector<CopyKey> endCycle();

  // Called when a compiled graph begins to run. Its reads follow `schedule` (null: none) unless there is a follower.
  // `params`: the parameters that the schedule's numbers stand for (equal layers may share a graph). `states` carries
  // out the schedule's moves. Returns what to do before the graph's first read.
  Step beginGraph(std::shared_ptr<const StepSchedule> schedule, std::vector<std::int64_t> params,
                  std::shared_ptr<StateOffload> states);
  // Called if the graph has failed, or did not run to its end.
  void endGraph() { schedule_ = nullptr; }

  // True if no schedule covers reads. `traced`: reads of compiled code.
  bool idle(bool traced) const { return follower_ == nullptr && (!traced || schedule_ == nullptr); }
  // What to do at this event. `current`: whether a persistent parameter of the follower needs no gather.
  Step at(const ProgramEvent& event, const std::function<bool(std::int64_t)>& current);

 private:
  Step atRead(const ProgramEvent& event);
  // Moves the states, and returns what to gather.
  Step serve(const ScheduledEvent& event);

  const ScheduleFollower::NameOf name_of_;
  const std::string where_;
  std::shared_ptr<ScheduleFollower> follower_;
  std::shared_ptr<const StepSchedule> schedule_;  // of the compiled graph that runs, until its last event
  std::vector<std::int64_t> params_;              // the parameters that its numbers stand for
  std::size_t next_ = 0;                          // event
  std::shared_ptr<StateOffload> states_;
};

}  // namespace dc
