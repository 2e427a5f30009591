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

  // Messages have the deadline that the group has now, whatever single collectives are given.
  explicit Messenger(std::shared_ptr<Group> group);
  // The same for a group that outlives it, and whose messenger no callback ends.
  explicit Messenger(Group& group) : Messenger(std::shared_ptr<Group>(std::shared_ptr<void>(), &group)) {}
  // What has not been moved yet ends with an error: before this returns, or, where a callback ends its own messenger,
  // after that callback.
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  void setTimeout(std::chrono::milliseconds timeout);

  // The memory must stay as it is until `done` is called. A message and the receive that matches it have the same size.
  void send(Run data, int to, std::uint64_t tag, Done done);
  void receive(Run data, int from, std::uint64_t tag, Done done);

 private:
  class Mover;
  struct Request;
  struct State;
  void ask(Request request, bool sends);

  const std::shared_ptr<State> state_;  // the thread's, too
  std::thread thread_;                  // under the state's mutex; started for the first message
};

}  // namespace dc::shm
