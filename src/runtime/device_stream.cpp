#include "deepcompile/runtime/device_stream.h"

#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/device_kernels.h"

namespace dc {
namespace {

using c10::impl::VirtualGuardImpl;

// Creating an event costs more than recording one, so events are reused. The events keep the pool alive, which may
// outlive the streams.
class EventPool {
 public:
  explicit EventPool(at::Device device) : device_(device), guard_(device.type()) {}
  ~EventPool() {
    for (void* handle : idle_) {
      guard_.destroyEvent(handle, device_.index());
    }
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Null if there is none; recording then creates one.
  void* take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      return nullptr;
    }
    void* handle = idle_.back();
    idle_.pop_back();
    return handle;
  }
  void give(void* handle) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(handle);
  }

  at::Device device() const { return device_; }
  const VirtualGuardImpl& guard() const { return guard_; }

 private:
  const at::Device device_;
  const VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::vector<void*> idle_;
};

class DeviceEvent final : public EventState {
 public:
  // Marks the work that `stream` was given until now. `error`: what that work threw, if anything.
  DeviceEvent(std::shared_ptr<EventPool> pool, const c10::Stream& stream, std::exception_ptr error)
      : pool_(std::move(pool)), handle_(pool_->take()), stream_(stream), error_(std::move(error)) {
    pool_->guard().record(&handle_, stream, pool_->device().index(), c10::EventFlag::PYTORCH_DEFAULT);
  }
  ~DeviceEvent() override { pool_->give(handle_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  bool passed() const override { return pool_->guard().queryEvent(handle_); }

  // The host does not block, so there is no deadline here; the watchdog enforces it.
  void wait(Deadline) const override {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    const c10::Stream current = pool_->guard().getStream(pool_->device());
    if (current != stream_) {
      pool_->guard().block(handle_, current);
    }
  }

 private:
  const std::shared_ptr<EventPool> pool_;
  void* handle_;
  const c10::Stream stream_;
  const std::exception_ptr error_;
};

// CUDA has no wait with a deadline.
void awaitOnHost(const Event& event, Deadline deadline, const std::string& name) {
  while (!event.passed()) {
    check(Clock::now() < deadline, [&] {
      return concat("the ", name, " stream did not finish its work before the deadline; raise `timeout` in the ",
                    "configuration, or look for a rank that is stuck or dead");
    });
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

class DeviceStream final : public Stream {
 public:
  DeviceStream(at::Device device, std::string name, std::shared_ptr<Watchdog> watchdog)
      : name_(std::move(name)),
        pool_(std::make_shared<EventPool>(device)),
        watchdog_(std::move(watchdog)),
        stream_(pool_->guard().getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  ~DeviceStream() override {
    if (caller_mark_ != nullptr) {
      pool_->give(caller_mark_);
    }
  }

  void run(Work work) override {
    const std::lock_guard lock(mutex_);
    enqueue(std::move(work));
  }

  void runWatched(Work work, Describe what) override {
    const std::lock_guard lock(mutex_);
    if (enqueue(std::move(work)) && watchdog_ != nullptr) {
      watchdog_->watch(last_, std::move(what));
    }
  }

  Event record() override {
    const std::lock_guard lock(mutex_);
    letGo();
    return last_;
  }

  void wait(const Event& event, Deadline deadline) override {
    if (event.trivial()) {
      return;
    }
    const std::lock_guard lock(mutex_);
    const c10::StreamGuard current(stream_);
    try {
      event.wait(deadline);
    } catch (...) {
      poison(std::current_exception());
    }
  }

  void synchronize(Deadline deadline) override {
    const Event last = record();
    if (!last.trivial()) {
      awaitOnHost(last, deadline, name_);
      last.wait(deadline);  // throws what the work threw
    }
  }

 private:
  struct InFlight {
    Event done;
    Work work;
  };

  // False when the stream is poisoned.
  bool enqueue(Work work) {
    letGo();
    if (error_ != nullptr) {
      return false;
    }
    const c10::Stream caller = pool_->guard().getStream(pool_->device());
    if (caller != stream_) {
      // A wait refers to the event's last record at the time of the call, so one event can be recorded repeatedly.
      pool_->guard().record(&caller_mark_, caller, pool_->device().index(), c10::EventFlag::PYTORCH_DEFAULT);
      pool_->guard().block(caller_mark_, stream_);
    }
    const c10::StreamGuard current(stream_);
    delayForDebugging(pool_->device());
    try {
      work();
    } catch (...) {
      poison(std::current_exception());
      return false;
    }
    last_ = Event(std::make_shared<DeviceEvent>(pool_, stream_, nullptr));
    in_flight_.push_back({last_, std::move(work)});
    return true;
  }

  void poison(std::exception_ptr error) {
    error_ = std::move(error);
    last_ = Event(std::make_shared<DeviceEvent>(pool_, stream_, error_));
  }

  void letGo() {
    while (!in_flight_.empty() && in_flight_.front().done.passed()) {
      in_flight_.pop_front();
    }
  }

  const std::string name_;
  const std::shared_ptr<EventPool> pool_;
  const std::shared_ptr<Watchdog> watchdog_;
  const c10::Stream stream_;
  std::mutex mutex_;
  void* caller_mark_ = nullptr;
  Event last_;
  std::deque<InFlight> in_flight_;
  std::exception_ptr error_;
};

class CallerStream final : public Stream {
 public:
  explicit CallerStream(at::Device device) : pool_(std::make_shared<EventPool>(device)) {}

  void run(Work work) override { work(); }
  Event record() override {
    return Event(std::make_shared<DeviceEvent>(pool_, pool_->guard().getStream(pool_->device()), nullptr));
  }
  void wait(const Event& event, Deadline deadline) override { event.wait(deadline); }
  void synchronize(Deadline deadline) override { awaitOnHost(record(), deadline, "caller's"); }
  bool followsCaller() const override { return true; }

 private:
  const std::shared_ptr<EventPool> pool_;
};

}  // namespace

std::shared_ptr<Stream> makeDeviceStream(at::Device device, std::string name, std::shared_ptr<Watchdog> watchdog) {
  return std::make_shared<DeviceStream>(device, std::move(name), std::move(watchdog));
}

std::int64_t currentStream(at::Device device) {
  return device.is_cpu() ? 0 : static_cast<std::int64_t>(VirtualGuardImpl(device.type()).getStream(device).id());
}

std::shared_ptr<Stream> makeCallerStream(at::Device device) { return std::make_shared<CallerStream>(device); }

}  // namespace dc
