// Follows the schedule of a step while the program runs, and returns at each event what to do there: which gathers to
// start, and whether the copy stays for a later read.
//
// There may be several schedules, one for each order in which the program's events came. All ranks follow the same
// schedules from the same point, so they start the same gathers as long as their programs do the same. At an unexpected
// event the rank asks all other ranks (`Agree`) before it does anything else: either all came to the same event at the
// same place, or that is an error. So a rank never starts a gather that others do not. After an agreed difference the
// cursor moves to another schedule that fits the events so far; else to the place where this schedule has the same
// event (the events between were skipped); else it stays (an additional event). Copies that no gather was started for
// are gathered on demand by their reader.
//
// Not synchronized: the runtime's lock guards it. It handles no tensors; the executor carries out the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "deepcompile/runtime/step_schedule.h"

namespace dc {

class ScheduleFollower {
 public:
  // A collective: every rank calls it with its difference in words. Throws unless all are the same.
  using Agree = std::function<void(const std::string& difference)>;
  using NameOf = std::function<std::string(std::int64_t id)>;

  // What the executor is to do before it serves an event.
  struct Step {
    bool followed = false;  // false: the schedule does not cover this event
    bool keep = false;
    std::vector<CopyKey> drop;  // copies that no later event reads
    std::vector<std::vector<CopyKey>> gathers;
  };
  // A cycle (forward and backward) that left every schedule.
  struct Divergence {
    std::string difference;            // the first one
    std::vector<ProgramEvent> events;  // all of the cycle
  };

  // `leaves`: parameters of leaf modules, which ranks may read or not as they route; only their Group is followed.
  // `persistent`: parameters that stay from update to update; only their first read after an update is followed.
  ScheduleFollower(std::vector<StepSchedule> schedules, std::unordered_set<std::int64_t> leaves,
                   std::unordered_set<std::int64_t> persistent, Agree agree, NameOf name_of);

  void addSchedule(StepSchedule schedule);
  std::size_t schedules() const { return schedules_.size(); }
  bool isLeaf(std::int64_t id) const { return leaves_.count(id) > 0; }
  const std::unordered_set<std::int64_t>& persistent() const { return persistent_; }
  // A cycle begins at its first event. `current`: persistent parameters that need no gather in it.
  bool inCycle() const { return in_cycle_; }
  void begin(std::unordered_set<std::int64_t> current);
  Step next(const ProgramEvent& event);
  // Ends the cycle; returns the copies to drop. All ranks call it.
  std::vector<CopyKey> end();
  // Gives the cycle up, without asking the other ranks; returns the copies to drop.
  std::vector<CopyKey> abandon();

  std::int64_t cycles() const { return cycles_; }            // that ended
  std::int64_t divergences() const { return divergences_; }  // of these, left every schedule
  std::int64_t switches() const { return switches_; }        // went over to another schedule
  std::int64_t dropped() const { return dropped_; }          // copies that were gathered ahead and not read
  std::vector<Divergence> takeDivergences() { return std::exchange(diverged_, {}); }

 private:
  bool follows(const ProgramEvent& event) const;
  // The first place from `from` on whose event is followed in this cycle.
  std::size_t following(const StepSchedule& schedule, std::size_t from) const;
  // The place after the events so far, if the schedule begins with them; its length + 1 otherwise.
  std::size_t placeAfterHistory(const StepSchedule& schedule) const;
  // Switches to a schedule that begins with the events so far (`whole`: and has no further events). False if none does.
  bool switchSchedule(bool whole);
  void noteDivergence(std::string difference);
  std::string describe(const ProgramEvent& event) const;
  std::string differenceAt(const std::string& found) const;
  // True for parameters whose copies stay for the whole step, whatever the schedule.
  bool stays(std::int64_t id) const { return leaves_.count(id) > 0 || persistent_.count(id) > 0; }
  // The place from `from` on at which `key` is read next; the schedule's length if it is not.
  std::size_t nextRead(const CopyKey& key, std::size_t from) const;
  bool gatheredBetween(const CopyKey& key, std::size_t from, std::size_t to) const;
  // Removes the copies that the schedule, from the cursor on, does not read before it gathers them again.
  std::vector<CopyKey> dropUnneeded();
  // Adds the gathers that the schedule has between `from` and the cursor, if their copies are read from the cursor on.
  void startLate(std::size_t from, Step& step);
  void serve(Step& step);
  std::vector<CopyKey> forgetAll();

  std::vector<StepSchedule> schedules_;
  std::vector<std::int64_t> followed_to_the_end_;  // by schedule
  const std::unordered_set<std::int64_t> leaves_;
  const std::unordered_set<std::int64_t> persistent_;
  const Agree agree_;
  const NameOf name_of_;

  bool in_cycle_ = false;
  std::size_t current_ = 0;
  std::size_t cursor_ = 0;
  bool left_ = false;                         // this cycle has left every schedule
  std::unordered_set<std::int64_t> settled_;  // persistent parameters that need no gather any more
  std::vector<ProgramEvent> history_;
  std::vector<CopyKey> live_;  // copies that exist according to the schedule
  std::vector<Divergence> diverged_;
  std::int64_t cycles_ = 0;
  std::int64_t divergences_ = 0;
  std::int64_t switches_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace dc
