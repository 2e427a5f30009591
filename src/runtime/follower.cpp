#include "deepcompile/runtime/follower.h"

#include <algorithm>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

// Limits the stored divergences if the program never reads them.
constexpr std::size_t kMostPending = 64;

bool contains(const std::vector<CopyKey>& keys, const CopyKey& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

ScheduleFollower::ScheduleFollower(std::vector<StepSchedule> schedules, std::unordered_set<std::int64_t> leaves,
                                   std::unordered_set<std::int64_t> persistent, Agree agree, NameOf name_of)
    : leaves_(std::move(leaves)),
      persistent_(std::move(persistent)),
      agree_(std::move(agree)),
      name_of_(std::move(name_of)) {
  check(!schedules.empty(), "a follower needs at least one schedule");
  for (StepSchedule& schedule : schedules) {
    addSchedule(std::move(schedule));
  }
}

void ScheduleFollower::addSchedule(StepSchedule schedule) {
  check(!in_cycle_, "a schedule cannot be added in the middle of an iteration");
  schedules_.push_back(std::move(schedule));
  followed_to_the_end_.push_back(0);
}

bool ScheduleFollower::follows(const ProgramEvent& event) const {
  if (event.kind == ProgramEvent::Kind::Group) {
    return true;
  }
  return leaves_.count(event.key.id) == 0 && settled_.count(event.key.id) == 0;
}

std::size_t ScheduleFollower::following(const StepSchedule& schedule, std::size_t from) const {
  while (from < schedule.size() && !follows(schedule[from].event)) {
    ++from;
  }
  return from;
}

void ScheduleFollower::begin(std::unordered_set<std::int64_t> current) {
  settled_ = std::move(current);
  history_.clear();
  live_.clear();
  left_ = false;
  in_cycle_ = true;
  // The schedule that was followed to its end most often; the counts are the same on all ranks.
  current_ = static_cast<std::size_t>(std::max_element(followed_to_the_end_.begin(), followed_to_the_end_.end()) -
                                      followed_to_the_end_.begin());
  cursor_ = 0;
}

std::string ScheduleFollower::describe(const ProgramEvent& event) const {
  const char* how = event.kind == ProgramEvent::Kind::Group ? "the leaf module of " : "";
  return concat(how, "'", name_of_(event.key.id), "'", event.backward ? " (backward)" : " (forward)");
}

std::string ScheduleFollower::differenceAt(const std::string& found) const {
  const StepSchedule& schedule = schedules_[current_];
  const std::string expected = cursor_ < schedule.size() ? describe(schedule[cursor_].event) : "the end";
  return concat("read ", history_.size(), " was ", found, " where order ", current_, " has ", expected);
}

std::size_t ScheduleFollower::placeAfterHistory(const StepSchedule& schedule) const {
  // Persistent parameters are followed at their first read only; within the history later ones are not listed.
  std::size_t place = 0;
  for (const ProgramEvent& read : history_) {
    while (place < schedule.size() && !(schedule[place].event == read) && !follows(schedule[place].event)) {
      ++place;
    }
    if (place >= schedule.size() || !(schedule[place].event == read)) {
      return schedule.size() + 1;
    }
    ++place;
  }
  return place;
}

bool ScheduleFollower::switchSchedule(bool whole) {
  for (std::size_t other = 0; other < schedules_.size(); ++other) {
    if (other == current_) {
      continue;
    }
    const StepSchedule& schedule = schedules_[other];
    const std::size_t place = placeAfterHistory(schedule);
    if (place > schedule.size() || (whole && following(schedule, place) < schedule.size())) {
      continue;
    }
    current_ = other;
    cursor_ = place;
    ++switches_;
    return true;
  }
  return false;
}

void ScheduleFollower::noteDivergence(std::string difference) {
  if (!left_) {
    left_ = true;
    ++divergences_;
    if (diverged_.size() < kMostPending) {
      diverged_.push_back({std::move(difference), {}});
    }
  }
}

std::size_t ScheduleFollower::nextRead(const CopyKey& key, std::size_t from) const {
  const StepSchedule& schedule = schedules_[current_];
  while (from < schedule.size() && !(schedule[from].event.key == key)) {
    ++from;
  }
  return from;
}

bool ScheduleFollower::gatheredBetween(const CopyKey& key, std::size_t from, std::size_t to) const {
  const StepSchedule& schedule = schedules_[current_];
  for (std::size_t place = from; place <= to && place < schedule.size(); ++place) {
    for (const auto& launch : schedule[place].gathers) {
      if (contains(launch, key)) {
        return true;
      }
    }
  }
  return false;
}

std::vector<CopyKey> ScheduleFollower::dropUnneeded() {
  const StepSchedule& schedule = schedules_[current_];
  std::vector<CopyKey> needed;
  std::vector<CopyKey> dropped;
  for (const CopyKey& key : live_) {
    const std::size_t read = nextRead(key, cursor_);
    (read < schedule.size() && !gatheredBetween(key, cursor_, read) ? needed : dropped).push_back(key);
  }
  live_ = std::move(needed);
  dropped_ += static_cast<std::int64_t>(dropped.size());
  return dropped;
}

void ScheduleFollower::startLate(std::size_t from, Step& step) {
  const StepSchedule& schedule = schedules_[current_];
  for (std::size_t place = from; place < cursor_; ++place) {
    for (const auto& launch : schedule[place].gathers) {
      std::vector<CopyKey> late;
      for (const CopyKey& key : launch) {
        const std::size_t read = nextRead(key, place);
        if (read >= cursor_ && read < schedule.size() && !contains(live_, key) && settled_.count(key.id) == 0) {
          late.push_back(key);
          if (!stays(key.id)) {
            live_.push_back(key);
          }
        }
      }
      if (!late.empty()) {
        step.gathers.push_back(std::move(late));
      }
    }
  }
}

// The event is the one at the cursor.
void ScheduleFollower::serve(Step& step) {
  const ScheduledEvent& read = schedules_[current_][cursor_];
  for (const auto& launch : read.gathers) {
    for (const CopyKey& key : launch) {
      if (!stays(key.id) && !contains(live_, key)) {
        live_.push_back(key);
      }
    }
    step.gathers.push_back(launch);
  }
  step.keep = read.keep;
  const CopyKey& key = read.event.key;
  if (read.event.kind != ProgramEvent::Kind::Group && !stays(key.id)) {
    if (!read.keep) {
      std::erase(live_, key);
    } else if (!contains(live_, key)) {
      live_.push_back(key);
    }
  }
  ++cursor_;
}

ScheduleFollower::Step ScheduleFollower::next(const ProgramEvent& event) {
  Step step;
  if (!follows(event)) {
    return step;
  }
  step.followed = true;
  const StepSchedule& schedule = schedules_[current_];
  cursor_ = following(schedule, cursor_);
  if (cursor_ < schedule.size() && schedule[cursor_].event == event) [[likely]] {
    history_.push_back(event);
    serve(step);
  } else {
    std::string difference = differenceAt(describe(event));
    agree_(difference);
    history_.push_back(event);
    if (switchSchedule(/*whole=*/false)) {
      step.drop = dropUnneeded();
      --cursor_;  // the schedule's place is behind this read
      startLate(0, step);
      serve(step);
    } else {
      noteDivergence(std::move(difference));
      std::size_t again = cursor_;
      while (again < schedule.size() && !(schedule[again].event == event)) {
        ++again;
      }
      if (again < schedule.size()) {  // what is between was skipped
        const std::size_t skipped = std::exchange(cursor_, again);
        step.drop = dropUnneeded();
        startLate(skipped, step);
        serve(step);
      } else if (contains(live_, event.key) && event.kind != ProgramEvent::Kind::Group) {
        step.keep = true;  // an additional read of what is there for a later one
      }
    }
  }
  if (persistent_.count(event.key.id) > 0) {
    settled_.insert(event.key.id);
  }
  return step;
}

std::vector<CopyKey> ScheduleFollower::forgetAll() {
  dropped_ += static_cast<std::int64_t>(live_.size());
  settled_.clear();
  in_cycle_ = false;
  return std::exchange(live_, {});
}

std::vector<CopyKey> ScheduleFollower::end() {
  if (!in_cycle_) {
    return {};
  }
  cursor_ = following(schedules_[current_], cursor_);
  if (cursor_ < schedules_[current_].size()) {
    std::string difference = differenceAt("the end of the iteration");
    agree_(difference);
    if (!switchSchedule(/*whole=*/true)) {
      noteDivergence(std::move(difference));
    }
  }
  ++cycles_;
  std::vector<ProgramEvent> events = std::exchange(history_, {});
  if (left_) {
    if (!diverged_.empty() && diverged_.back().events.empty()) {
      diverged_.back().events = std::move(events);
    }
  } else {
    ++followed_to_the_end_[current_];
  }
  return forgetAll();
}

std::vector<CopyKey> ScheduleFollower::abandon() {
  history_.clear();
  return forgetAll();
}

}  // namespace dc
