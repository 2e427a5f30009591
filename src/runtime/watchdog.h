// Enforces deadlines of collectives on a device's streams, for which no host thread waits.
//
// It owns a thread that checks the oldest unfinished work every kPeriod. If that has passed its deadline, or `broken`
// reports an error, the thread calls `stuck` once, with a message, and stops watching.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "deepcompile/runtime/stream.h"

namespace dc {

class Watchdog {
 public:
  struct Callbacks {
    // Seconds that work may take which is passed to watch() now.
    std::function<double()> timeout;
    // An error that a channel has reported asynchronously (such as NCCL's), if any.
    std::function<std::optional<std::string>()> broken;
    // Called with the operation that did not end and the reason why it is given up.
    std::function<void(const std::string& what, const std::string& why)> stuck;
  };

  explicit Watchdog(Callbacks callbacks);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Watches work that ends when `done` passes. Work of one stream must be passed in the order in which it ends.
  void watch(Event done, Stream::Describe what);
  // When this returns, no callback is running or will be called. Not to be called from a callback.
  void stop();

 private:
  static constexpr std::chrono::milliseconds kPeriod{50};

  struct Watched {
    Event done;
    Stream::Describe what;
    Deadline deadline;
    double seconds;
  };
  void serve();
  // Removes work that has ended. Returns the arguments of `stuck` if some work has passed its deadline.
  std::optional<std::pair<std::string, std::string>> look();

  const Callbacks callbacks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Watched> watched_;
  bool stopping_ = false;
  bool given_up_ = false;
  std::thread thread_;  // last: starts when everything above stands
};

}  // namespace dc
