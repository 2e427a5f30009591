#include "deepcompile/runtime/timeline.h"

#include <chrono>
#include <limits>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dc {

class DeviceTime {
 public:
  explicit DeviceTime(at::Device device) : device_(device), guard_(device.type()) {
    // BACKEND_DEFAULT: an event that keeps its time.
    guard_.record(&handle_, guard_.getStream(device), device.index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  ~DeviceTime() { guard_.destroyEvent(handle_, device_.index()); }
  DeviceTime(const DeviceTime&) = delete;
  DeviceTime& operator=(const DeviceTime&) = delete;

  void await() const { guard_.synchronizeEvent(handle_); }
  std::int64_t nanosecondsSince(const DeviceTime& earlier) const {
    return static_cast<std::int64_t>(guard_.elapsedTime(earlier.handle_, handle_, device_.index()) * 1e6);
  }

 private:
  const at::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  void* handle_ = nullptr;
};

std::int64_t Timeline::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Timeline::record(bool on) {
  const std::lock_guard lock(mutex_);
  if (on && !device_.is_cpu()) {
    // Where the host is kept from looking at its clock, both are apart: of a few tries the quickest counts.
    std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
    for (int attempt = 0; attempt < 3; ++attempt) {
      const std::int64_t before = now();
      auto moment = std::make_shared<DeviceTime>(device_);
      moment->await();
      const std::int64_t after = now();
      if (after - before < shortest) {
        shortest = after - before;
        base_ = {after, std::move(moment)};
      }
    }
  }
  recording_.store(on, std::memory_order_relaxed);
}

Timeline::Mark Timeline::mark() const {
  if (!recording()) {
    return {};
  }
  if (device_.is_cpu()) {
    return {now()};
  }
  return {0, std::make_shared<DeviceTime>(device_)};
}

void Timeline::add(Kind kind, std::int64_t id, std::int64_t bytes, const Mark& start) {
  if (!start) {
    return;
  }
  Mark end = mark();
  const std::lock_guard lock(mutex_);
  if (end && pending_.size() < kMost) {
    pending_.push_back({kind, id, bytes, start, std::move(end)});
  }
}

std::int64_t Timeline::timeOf(const Mark& mark) const {
  if (mark.device == nullptr) {
    return mark.host;
  }
  mark.device->await();
  return base_.host + mark.device->nanosecondsSince(*base_.device);
}

void Timeline::clear() {
  const std::lock_guard lock(mutex_);
  pending_.clear();
}

std::vector<Timeline::Span> Timeline::take() {
  std::vector<Pending> pending;
  {
    const std::lock_guard lock(mutex_);
    pending = std::exchange(pending_, {});
  }
  std::vector<Span> spans;
  spans.reserve(pending.size());
  for (const Pending& one : pending) {
    spans.push_back({one.kind, one.id, one.bytes, timeOf(one.start), timeOf(one.end)});
  }
  return spans;
}

}  // namespace dc
