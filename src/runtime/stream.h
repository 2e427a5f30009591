// Streams and events: the order of asynchronous work, the same interface for every device.
//
// A stream runs work in the order of run(). An event marks a point of a stream; a waiter is ordered after all work that
// the stream was given before the event was recorded. On CPU the calling thread is the compute stream, so waiting
// blocks it (with a deadline); a device stream only enqueues the dependency.
//
// Failure: when work throws, the stream is poisoned. Its later work is skipped, and every event recorded from then on
// rethrows the first error at the wait that depends on it. A poisoned stream never recovers: after a failed collective
// the ranks no longer agree on what comes next.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace dc {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
using Seconds = std::chrono::duration<double>;

inline Deadline deadlineAfter(Seconds timeout) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

class EventState {
 public:
  virtual ~EventState() = default;
  virtual bool passed() const = 0;
  // Orders the caller after the event. Throws what the stream's work threw, or dc::Error past the deadline.
  virtual void wait(Deadline deadline) const = 0;
};

// A shared handle; the default-constructed event has passed already.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<const EventState> state) : state_(std::move(state)) {}

  bool passed() const { return state_ == nullptr || state_->passed(); }
  // True if there is nothing to wait for and wait() would not throw.
  bool trivial() const { return state_ == nullptr; }
  void wait(Deadline deadline) const {
    if (state_ != nullptr) {
      state_->wait(deadline);
    }
  }

 private:
  std::shared_ptr<const EventState> state_;
};

class Stream {
 public:
  using Work = std::function<void()>;
  using Describe = std::function<std::string()>;

  virtual ~Stream() = default;

  // Runs `work` after everything given before. What `work` captures lives until it has run. On a device `work` is
  // called at once and enqueues; it starts after what the caller's current stream was given before, and what it
  // captures lives until the device has done it.
  virtual void run(Work work) = 0;
  // The same for work that waits for other ranks. On a device, where no host thread waits for it, a watchdog enforces
  // the deadline and reports `what` if it does not end.
  virtual void runWatched(Work work, Describe what) { run(std::move(work)); }
  virtual Event record() = 0;
  // Work given from now on starts after `event`. An event that fails, or does not pass before the deadline, poisons.
  virtual void wait(const Event& event, Deadline deadline) = 0;
  // Blocks the caller until all work given so far has run; throws like Event::wait.
  virtual void synchronize(Deadline deadline) = 0;
  // True if work runs in the caller's own order, so that memory that it reads may be freed when run() has returned.
  virtual bool followsCaller() const { return false; }
};

enum class CpuStreamMode { Inline, Worker };

// Inline runs work on the calling thread at once; Worker on a thread of its own. `name` is for error messages.
std::shared_ptr<Stream> makeCpuStream(CpuStreamMode mode, std::string name);

// The mode that DEEPCOMPILE_CPU_STREAM asks for (benchmarks/streams.py measures the choice). `auto` takes Worker where
// the communicator sleeps while it waits (`spins` is false): compute goes on meanwhile, even without a core to spare.
// Where it spins, a worker needs a core of its own beside the compute threads of every rank on this host; else Inline.
CpuStreamMode chooseCpuStreamMode(const std::string& wanted, bool spins, int local_ranks, int compute_threads,
                                  int usable_cores);

}  // namespace dc
