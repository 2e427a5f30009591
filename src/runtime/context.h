// What the parts of one runtime share: configuration, rank, counters, lock, deadlines.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "deepcompile/comm/traffic.h"
#include "deepcompile/runtime/config.h"
#include "deepcompile/runtime/late_error.h"
#include "deepcompile/runtime/stats.h"
#include "deepcompile/runtime/step_trace.h"
#include "deepcompile/runtime/stream.h"
#include "deepcompile/runtime/unsettled.h"

namespace dc {

class Context {
 public:
  Context(Config config, int rank, int size)
      : config(config), rank(rank), size(size), place("rank " + std::to_string(rank) + " of " + std::to_string(size)) {}

  const Config config;
  const int rank;
  const int size;
  const std::string place;                                        // "rank 1 of 3", for messages
  const std::uint64_t generation = next_generation.fetch_add(1);  // unique in the process
  const std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();
  const std::shared_ptr<LateError> late_error = std::make_shared<LateError>();
  const std::shared_ptr<StepTrace> trace = std::make_shared<StepTrace>();
  const std::shared_ptr<Unsettled> unsettled = std::make_shared<Unsettled>();
  Stats stats;

  // Guards the registry and the executors: a backward runs on threads of its own. Asynchronous work never takes it.
  std::mutex mutex;

  // True if work is ordered on a device's streams and the host does not wait for it. Set before anything runs.
  bool device_order = false;

  // Small parameters of a step with holdShards are gathered together at its first gather and stay to its end. The same
  // on all ranks; set between steps.
  bool small_together = false;

  // While true, reductions and frees are skipped.
  std::atomic<bool> profiling{false};
  // Set when the first step has ended.
  std::atomic<bool> warm{false};
  // True while waits do not count as the first step's: sharding, or reading and writing back whole parameters.
  std::atomic<bool> outside_step{false};
  // Called when timeout() has changed, to tell the communicators. Set before anything runs, empty once closed.
  std::function<void()> timeout_changed;

  static inline std::atomic<std::uint64_t> next_generation{1};

  double timeout() const { return config.timeout * (warm || outside_step ? 1.0 : Config::kFirstStepFactor); }
  Deadline deadline() const { return deadlineAfter(Seconds(timeout())); }

  // Called with the mutex held.
  void endFirstStep() {
    if (!warm.exchange(true) && timeout_changed) {
      timeout_changed();
    }
  }

  // Counts a wait that has blocked the caller since `began` (StepTrace::now).
  void countWait(std::int64_t began) {
    stats.waits.fetch_add(1, std::memory_order_relaxed);
    stats.wait_nanoseconds.fetch_add(StepTrace::now() - began, std::memory_order_relaxed);
  }

  // Waits on behalf of the caller, and counts it.
  void await(const Event& event) {
    if (event.trivial()) {
      return;
    }
    const std::int64_t began = StepTrace::now();
    // Later than the operation's own deadline, whose error says more.
    event.wait(deadline() + std::chrono::seconds(10));
    countWait(began);
  }
};

}  // namespace dc
