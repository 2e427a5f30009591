#include "deepcompile/runtime/buffer_pool.h"

#include <algorithm>
#include <utility>

namespace dc {
namespace {

// A buffer of a larger size may serve if at most this share of it is wasted (an eighth): layers repeat their sizes, so
// that exact fits are the rule.
bool fits(std::int64_t size, std::int64_t wanted) { return size - wanted <= wanted / 8; }

}  // namespace

Buffer BufferPool::take(std::int64_t bytes) {
  constexpr std::int64_t kGranule = 64;
  const std::int64_t wanted = (std::max<std::int64_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
  const std::lock_guard lock(mutex_);
  ++taken_;
  Buffer buffer;
  if (const auto found = idle_.lower_bound(wanted); found != idle_.end() && fits(found->first, wanted)) {
    buffer = std::move(found->second);
    idle_.erase(found);
    idle_bytes_ -= buffer.bytes;
    ++reused_;
  } else {
    makeRoom(wanted);
    buffer.memory = allocator_->allocate(static_cast<std::size_t>(wanted));
    buffer.bytes = wanted;
  }
  live_ += buffer.bytes;
  most_live_ = std::max(most_live_, live_);
  peak_ = std::max(peak_, live_);
  return buffer;
}

void BufferPool::give(Buffer buffer) {
  const std::lock_guard lock(mutex_);
  live_ -= buffer.bytes;
  idle_bytes_ += buffer.bytes;
  const std::int64_t size = buffer.bytes;
  idle_.emplace(size, std::move(buffer));
}

void BufferPool::setLimit(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void BufferPool::trim() {
  const std::lock_guard lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
}

// Largest first: few frees, and what is left is what small parameters can use.
void BufferPool::makeRoom(std::int64_t bytes) {
  const std::int64_t allowed = std::max(limit_, std::max(most_live_, live_ + bytes));
  while (!idle_.empty() && live_ + idle_bytes_ + bytes > allowed) {
    const auto largest = std::prev(idle_.end());
    idle_bytes_ -= largest->first;
    idle_.erase(largest);
  }
}

std::int64_t BufferPool::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

std::int64_t BufferPool::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::int64_t BufferPool::idle() const {
  const std::lock_guard lock(mutex_);
  return idle_bytes_;
}

std::int64_t BufferPool::taken() const {
  const std::lock_guard lock(mutex_);
  return taken_;
}

std::int64_t BufferPool::reused() const {
  const std::lock_guard lock(mutex_);
  return reused_;
}

void BufferPool::resetCounts() {
  const std::lock_guard lock(mutex_);
  peak_ = live_;
  taken_ = 0;
  reused_ = 0;
}

}  // namespace dc
