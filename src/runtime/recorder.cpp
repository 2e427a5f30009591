#include "deepcompile/runtime/recorder.h"

#include <utility>

#include "deepcompile/runtime/timeline.h"

namespace dc {
namespace {

class HostClock final : public StepClock {
 public:
  std::int64_t mark() override { return Timeline::now(); }
  std::int64_t nanoseconds(std::int64_t mark) override { return mark; }
};

}  // namespace

std::unique_ptr<StepClock> makeHostClock() { return std::make_unique<HostClock>(); }

void Recorder::start() {
  const std::lock_guard lock(mutex_);
  ops_.clear();
  ops_.reserve(4096);
  versions_.clear();
  iteration_ = 0;
  micro_ = 0;
  backward_ = false;
  compiled_.store(false, std::memory_order_relaxed);
  recording_.store(true, std::memory_order_relaxed);
}

std::vector<RecordedOp> Recorder::stop() {
  recording_.store(false, std::memory_order_relaxed);
  std::vector<RecordedOp> ops;
  {
    const std::lock_guard lock(mutex_);
    ops = std::exchange(ops_, {});
  }
  for (RecordedOp& op : ops) {
    op.start = clock_->nanoseconds(op.start);
    op.end = clock_->nanoseconds(op.end);
  }
  return ops;
}

void Recorder::append(RecordedOp op) {
  if (ops_.size() < kMost) {
    op.iteration = iteration_;
    op.micro = micro_;
    ops_.push_back(op);
  }
}

void Recorder::add(RecordedOp::Kind kind, std::int64_t id, at::ScalarType dtype, std::int64_t bytes, bool backward,
                   std::int64_t start, std::int64_t version) {
  if (start == 0 || !recording()) {
    return;
  }
  const std::int64_t end = clock_->mark();
  const std::lock_guard lock(mutex_);
  if (version >= 0) {
    const auto [known, first] = versions_.emplace(id, version);
    if (!first && known->second != version) {
      // Updates change all shards before the next read: the first changed one starts the iteration.
      if (micro_ > 0) {
        ++iteration_;
        micro_ = 0;
      }
      versions_.clear();
      versions_.emplace(id, version);
    }
  }
  backward_ = backward;
  append({kind, id, dtype, bytes, backward, 0, 0, start, end});
  if (kind == RecordedOp::Kind::End) {
    ++micro_;
    backward_ = false;
  }
}

void Recorder::release(std::int64_t id, at::ScalarType dtype, std::int64_t bytes) {
  if (!recording()) {
    return;
  }
  const std::int64_t now = clock_->mark();
  const std::lock_guard lock(mutex_);
  append({RecordedOp::Kind::Release, id, dtype, bytes, backward_, 0, 0, now, now});
}

}  // namespace dc
