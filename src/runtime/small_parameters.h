// Small parameters that steps with holdShards have gathered by copying. The first gather of a later such step gathers
// all of them, and they stay until its end: one collective instead of one for each. All ranks gather the same
// parameters, so this list is the same on all ranks.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "deepcompile/runtime/step_schedule.h"

namespace dc {

class SmallParameters {
 public:
  // Called when a step with holdShards begins, or its reads have ended.
  void begin() { gathered_ = false; }
  // True at the first gather of the step.
  bool firstGather() { return !std::exchange(gathered_, true); }
  // Notes a parameter of `bytes` that was gathered by copying, to be gathered with the others from the next step on.
  void note(const CopyKey& key, std::int64_t bytes) {
    if (mayNote(bytes) && stays_.try_emplace({key.id, key.dtype}, false).second) {
      bytes_ += bytes;
    }
  }
  bool mayNote(std::int64_t bytes) const { return bytes <= kSmallBytes && bytes_ + bytes <= kTogetherBytes; }
  // Calls `take` for each parameter that does not stay yet; if it returns true the parameter stays.
  template <typename Take>
  void stay(Take take) {
    for (auto& [key, stays] : stays_) {
      stays = stays || take(CopyKey{key.first, key.second});
    }
  }
  // Calls `leave` for each parameter that stays; then none stays.
  template <typename Leave>
  void end(Leave leave) {
    for (auto& [key, stays] : stays_) {
      if (std::exchange(stays, false)) {
        leave(CopyKey{key.first, key.second});
      }
    }
    begin();
  }

 private:
  static constexpr std::int64_t kSmallBytes = 64 << 10;
  static constexpr std::int64_t kTogetherBytes = 4 << 20;
  std::map<std::pair<std::int64_t, at::ScalarType>, bool> stays_;
  std::int64_t bytes_ = 0;  // of all
  bool gathered_ = false;   // in the held step
};

}  // namespace dc
