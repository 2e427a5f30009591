// Messages between two ranks, outside the order of the collectives. Sends and receives of one pair and tag match in the
// order in which they were asked for; different tags do not wait for one another.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "deepcompile/shm/group.h"
#include "deepcompile/shm/runs.h"

namespace dc::shm {

inline constexpr int kAnySource = -1;

// Moves messages on a thread of its own, so that two ranks which both send first and receive then do not wait for ever.
class Messenger {
 public:
  // Called on the messenger's thread, once: with the error, or none and the rank that sent.
  using Done = std::function<void(std::exception_ptr error, int source)>;

  // The group must outlive it. Messages have the deadline that the group has now, whatever single collectives are
  // given.
  explicit Messenger(Group& group);
  // What has not been moved yet ends with an error.
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }

  // The memory must stay as it is until `done` is called. A message and the receive that matches it have the same size.
  void send(Run data, int to, std::uint64_t tag, Done done);
  void receive(Run data, int from, std::uint64_t tag, Done done);

 private:
  class Mover;
  void start();
  void run();

  Group& group_;
  std::atomic<std::int64_t> timeout_;  // milliseconds
  std::mutex mutex_;
  std::condition_variable asked_;
  std::unique_ptr<Mover> mover_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dc::shm
