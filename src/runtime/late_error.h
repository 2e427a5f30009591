// Holds an error found where nothing can be thrown (a destructor, another thread), for the next call that can throw it.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "deepcompile/base/error.h"

namespace dc {

class LateError {
 public:
  // The first one stays.
  void set(std::string message) { keep(std::move(message), false); }

  // The same for an error after which the runtime is unusable: every raise() throws it.
  void setForGood(std::string message) { keep(std::move(message), true); }

  // Throws what was set, once.
  void raise() {
    if (!there_) [[likely]] {
      return;
    }
    std::optional<std::string> message;
    {
      const std::lock_guard lock(mutex_);
      message = for_good_ ? message_ : std::exchange(message_, std::nullopt);
      there_ = for_good_;
    }
    if (message) {
      fail(*message);
    }
  }

 private:
  void keep(std::string message, bool for_good) {
    const std::lock_guard lock(mutex_);
    if (!message_) {
      message_ = std::move(message);
    }
    for_good_ = for_good_ || for_good;
    there_ = true;
  }

  std::atomic<bool> there_{false};  // a cheap check for raise(), which every operator calls
  std::mutex mutex_;
  std::optional<std::string> message_;
  bool for_good_ = false;
};

}  // namespace dc
