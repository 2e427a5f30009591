// What happened when, while somebody records: the measurements behind a plan, and the trace that users see.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace dc {

class Timeline {
 public:
  enum class Kind {
    Take,    // the caller in gather_shard: from its call until the parameter was readable
    Grad,    // the caller in reduce_shard or reduce_grad
    Gather,  // one gather on its channel
    Reduce,  // one reduction on its channel
  };
  struct Span {
    Kind kind;
    std::int64_t id;     // Take, Grad: the parameter; Gather, Reduce: its first parameter
    std::int64_t bytes;  // Gather, Reduce: of whole parameters or gradients
    std::int64_t start;  // nanoseconds of the steady clock
    std::int64_t end;
  };

  static std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void record(bool on) { recording_.store(on, std::memory_order_relaxed); }
  bool recording() const { return recording_.load(std::memory_order_relaxed); }

  void add(Kind kind, std::int64_t id, std::int64_t bytes, std::int64_t start) {
    const std::int64_t end = now();
    const std::lock_guard lock(mutex_);
    if (spans_.size() < kMost) {
      spans_.push_back({kind, id, bytes, start, end});
    }
  }

  std::vector<Span> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(spans_, {});
  }

 private:
  static constexpr std::size_t kMost = 1 << 20;  // a recording that nobody takes must not grow for ever

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

}  // namespace dc
