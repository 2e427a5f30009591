// The communication of iterations as they ran: every gather, wait, release and reduction of the calling program, in its
// order, with the times between which the program computed. What record and replay (docs/replay.md) plans from.
//
// Off, it costs one relaxed load for each call. On, two moments of the timeline and an append. On a device a moment is
// an event, turned into nanoseconds only when the recording is taken: recording never waits for the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/timeline.h"

namespace dc {

struct RecordedOp {
  enum class Kind : std::uint8_t {
    Gather,    // a read that started a gather: from the call until it was started
    Read,      // a read that found a copy
    Prefetch,  // one of the parameters that a leaf module asks for at once; all have the same start
    Wait,      // the program waits until what it read is there
    Release,   // the memory of a gathered copy went back; an instant
    Reduce,    // a gradient handed over
    End,       // the end of a backward, with what had to be waited for; `id` is -1
    Call,      // a compiled graph begins to run; an instant; `id` is -1
  };
  Kind kind = Kind::Read;
  std::int64_t id = -1;
  at::ScalarType dtype = at::kFloat;
  std::int64_t bytes = 0;  // of the whole parameter or gradient
  bool backward = false;   // called in a backward pass
  int iteration = 0;       // parameters were updated between two iterations
  int micro = 0;           // micro-batch: backwards since the last update
  std::int64_t start = 0;
  std::int64_t end = 0;
};

struct Recording {
  std::vector<RecordedOp> ops;
  std::int64_t ended = 0;  // when it was stopped; 0: nothing was being recorded
};

class Recorder {
 public:
  // `timeline` tells the moments; it records as long as this does.
  explicit Recorder(std::shared_ptr<Timeline> timeline) : timeline_(std::move(timeline)) {}

  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Starts anew: what was recorded before is dropped.
  void start();
  // Stops and hands over what was recorded, with times in nanoseconds. On a device it waits for what was launched.
  Recording stop();
  // Stops and forgets what was recorded, spans of the timeline included. Waits for nothing.
  void drop();
  // True when compiled code communicated since start(): its collectives are placed by a plan already.
  bool sawCompiled() const { return compiled_.load(std::memory_order_relaxed); }
  void noteCompiled() {
    if (recording()) {
      compiled_.store(true, std::memory_order_relaxed);
    }
  }

  // The moment for `start` of add; none where nothing is recorded.
  Timeline::Mark mark() const { return recording() ? timeline_->mark() : Timeline::Mark(); }
  // An operation that began at `start` and ends now. `version` of the shard tells iterations apart (reads only). Does
  // nothing where `start` was not recorded, so that what began before is left out.
  void add(RecordedOp::Kind kind, std::int64_t id, at::ScalarType dtype, std::int64_t bytes, bool backward,
           const Timeline::Mark& start, std::int64_t version = -1);
  // A compiled graph, of the backward or not, begins to run.
  void call(bool backward);
  // From any thread.
  void release(std::int64_t id, at::ScalarType dtype, std::int64_t bytes);

 private:
  static constexpr std::size_t kMost = 1 << 20;  // a recording that nobody stops must not grow for ever

  struct Pending {
    RecordedOp op;
    Timeline::Mark start;
    Timeline::Mark end;
  };
  void append(RecordedOp op, Timeline::Mark start, Timeline::Mark end);

  std::atomic<bool> recording_{false};
  std::atomic<bool> compiled_{false};
  std::mutex mutex_;
  const std::shared_ptr<Timeline> timeline_;
  std::vector<Pending> ops_;
  std::unordered_map<std::int64_t, std::int64_t> versions_;  // of each shard at its last read
  int iteration_ = 0;
  int micro_ = 0;
  bool backward_ = false;  // the last operation of the program was in a backward: where a release belongs
};

}  // namespace dc
