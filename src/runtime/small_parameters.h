// Small parameters that held steps have gathered by copying. From then on the first gather of such a step takes all of
// them along, and they stay until its end: one meeting of the ranks instead of one for each. The ranks gather the same,
// so they know the same.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "deepcompile/runtime/step_schedule.h"

namespace dc {

class SmallParameters {
 public:
  // A held step begins, or its reads have ended.
  void begin() { gathered_ = false; }
  // True at the first gather of a held step.
  bool firstGather() { return !std::exchange(gathered_, true); }
  // Of `bytes`, gathered by copying: may be taken along from the next step on.
  void note(const CopyKey& key, std::int64_t bytes) {
    if (bytes <= kSmallBytes && bytes_ + bytes <= kTogetherBytes &&
        stays_.try_emplace({key.id, key.dtype}, false).second) {
      bytes_ += bytes;
    }
  }
  bool mayNote(std::int64_t bytes) const { return bytes <= kSmallBytes && bytes_ + bytes <= kTogetherBytes; }
  // Calls `take` for each that does not stay yet; from a true answer on it stays.
  template <typename Take>
  void stay(Take take) {
    for (auto& [key, stays] : stays_) {
      stays = stays || take(CopyKey{key.first, key.second});
    }
  }
  // Calls `leave` for each that stays; it stays no longer.
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
