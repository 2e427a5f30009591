// What happened when, while somebody records: the measurements behind a plan, and the trace that users see.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>

namespace dc {

// A point of an event on a device, whose time is known when the device has passed it.
class DeviceTime;

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
  // A moment: of the host's clock, or of the current stream of the device.
  struct Mark {
    std::int64_t host = 0;  // 0: nobody records
    std::shared_ptr<DeviceTime> device = nullptr;
    explicit operator bool() const { return host != 0 || device != nullptr; }
  };

  static std::int64_t now();

  // From now on moments are those of the device. Before the first recording.
  void useDevice(at::Device device) { device_ = device; }

  void record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }

  // The moment now, where somebody records. On a device: when the current stream has come this far.
  Mark mark() const;
  // A span that ends now. Does nothing where `start` was not recorded.
  void add(Kind kind, std::int64_t id, std::int64_t bytes, const Mark& start);

  // On a device, waits until it has passed the last of them.
  std::vector<Span> take();
  // Forgets all spans.
  void clear();

  // Nanoseconds of the steady clock. On a device, waits until it has passed the moment.
  std::int64_t timeOf(const Mark& mark) const;

 private:
  static constexpr std::size_t kMost = 1 << 20;  // a recording that nobody takes must not grow for ever

  struct Pending {
    Kind kind;
    std::int64_t id;
    std::int64_t bytes;
    Mark start;
    Mark end;
  };
  at::Device device_ = at::kCPU;
  std::atomic<bool> recording_{false};
  mutable std::mutex mutex_;
  Mark base_;  // a moment that is known on both clocks
  std::vector<Pending> pending_;
};

}  // namespace dc
