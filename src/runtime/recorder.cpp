#include "deepcompile/runtime/recorder.h"

#include <utility>

namespace dc {

void Recorder::start() {
  timeline_->record(true);
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

Recording Recorder::stop() {
  const Timeline::Mark ended = mark();
  recording_.store(false, std::memory_order_relaxed);
  std::vector<Pending> pending;
  {
    const std::lock_guard lock(mutex_);
    pending = std::exchange(ops_, {});
  }
  Recording recording;
  recording.ended = timeline_->timeOf(ended);
  recording.ops.reserve(pending.size());
  for (Pending& one : pending) {
    one.op.start = timeline_->timeOf(one.start);
    one.op.end = timeline_->timeOf(one.end);
    recording.ops.push_back(one.op);
  }
  timeline_->record(false);
  return recording;
}

void Recorder::drop() {
  recording_.store(false, std::memory_order_relaxed);
  timeline_->record(false);
  timeline_->clear();
  const std::lock_guard lock(mutex_);
  ops_.clear();
}

void Recorder::append(RecordedOp op, Timeline::Mark start, Timeline::Mark end) {
  if (ops_.size() < kMost) {
    op.iteration = iteration_;
    op.micro = micro_;
    ops_.push_back({op, std::move(start), std::move(end)});
  }
}

void Recorder::add(RecordedOp::Kind kind, std::int64_t id, at::ScalarType dtype, std::int64_t bytes, bool backward,
                   const Timeline::Mark& start, std::int64_t version) {
  if (!start || !recording()) {
    return;
  }
  Timeline::Mark end = timeline_->mark();
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
  append({kind, id, dtype, bytes, backward}, start, std::move(end));
  if (kind == RecordedOp::Kind::End) {
    ++micro_;
    backward_ = false;
  }
}

void Recorder::call(bool backward) {
  if (!recording()) {
    return;
  }
  const Timeline::Mark now = timeline_->mark();
  const std::lock_guard lock(mutex_);
  append({RecordedOp::Kind::Call, -1, at::kFloat, 0, backward}, now, now);
}

void Recorder::release(std::int64_t id, at::ScalarType dtype, std::int64_t bytes) {
  if (!recording()) {
    return;
  }
  const Timeline::Mark now = timeline_->mark();
  const std::lock_guard lock(mutex_);
  append({RecordedOp::Kind::Release, id, dtype, bytes, backward_}, now, now);
}

}  // namespace dc
