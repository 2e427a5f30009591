// Sees that work which nobody waits for on the host ends: collectives on the streams of a device.
//
// It owns a thread that looks at the oldest unfinished work every kPeriod. When that passes its deadline, or `broken`
// has something to say, `stuck` is called once, on the watchdog's thread, with a message; from then on nothing is
// watched.
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
    // Seconds that the work given now may take.
    std::function<double()> timeout;
    // What the channels report of their own accord; nothing while they are well.
    std::function<std::optional<std::string>()> broken;
    // Called with `what` was under way and why it is given up.
    std::function<void(const std::string& what, const std::string& why)> stuck;
  };

  explicit Watchdog(Callbacks callbacks);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Work that ends when `done` passes. Work must be given in the order in which it ends, per `done`'s stream.
  void watch(Event done, Stream::Describe what);
  // No callback is running or will be called when this returns. Not from a callback.
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
  // Forgets what has ended. Returns what is to be said when something will not.
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
