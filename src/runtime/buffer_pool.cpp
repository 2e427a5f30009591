#include "deepcompile/runtime/buffer_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace dc {

std::optional<Buffer> BufferPool::reuse(std::int64_t bytes, std::int64_t stream) {
  const auto found = idle_.find(bytes);
  if (found == idle_.end()) {
    return std::nullopt;
  }
  std::vector<Buffer>& buffers = found->second;
  const auto last = std::find_if(buffers.rbegin(), buffers.rend(), [&](const Buffer& b) { return b.stream == stream; });
  if (last == buffers.rend()) {
    return std::nullopt;
  }
  Buffer buffer = std::move(*last);
  buffers.erase(std::next(last).base());
  return buffer;
}

Buffer BufferPool::take(std::int64_t bytes, std::int64_t stream) {
  constexpr std::int64_t kGranule = 64;
  const std::int64_t wanted = (std::max<std::int64_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
  Dropped dropped;
  {
    const std::lock_guard lock(mutex_);
    ++taken_;
    if (std::optional<Buffer> idle = reuse(wanted, stream)) {
      idle_bytes_ -= idle->bytes;
      ++reused_;
      countTaken(*idle);
      return *std::move(idle);
    }
    dropped = makeRoom(wanted);
  }
  dropped.clear();
  Buffer buffer;
  buffer.memory = allocator_->allocate(static_cast<std::size_t>(wanted));
  buffer.bytes = wanted;
  buffer.stream = stream;
  const std::lock_guard lock(mutex_);
  countTaken(buffer);
  return buffer;
}

void BufferPool::countTaken(const Buffer& buffer) {
  live_ += buffer.bytes;
  most_live_ = std::max(most_live_, live_);
  peak_ = std::max(peak_, live_);
}

void BufferPool::give(Buffer buffer) {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  live_ -= buffer.bytes;
  idle_bytes_ += buffer.bytes;
  idle_[buffer.bytes].push_back(std::move(buffer));
  dropped = dropIdle(idle_bytes_ - most_idle_);
}

void BufferPool::forgetMost() {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  most_live_ = live_;
  dropped = dropIdle(idle_bytes_);
}

void BufferPool::limitIdle(std::int64_t bytes) {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  most_idle_ = bytes;
  dropped = dropIdle(idle_bytes_ - most_idle_);
}

void BufferPool::setLimit(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void BufferPool::trim() {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  dropped = drop(idle_bytes_);
}

BufferPool::Dropped BufferPool::makeRoom(std::int64_t bytes) {
  const std::int64_t allowed = std::max(limit_, std::max(most_live_, live_ + bytes));
  return dropIdle(live_ + idle_bytes_ + bytes - allowed);
}

BufferPool::Dropped BufferPool::dropIdle(std::int64_t bytes) {
  return keep_ == Keep::ForGood ? Dropped() : drop(bytes);
}

// Largest first: few frees, and small buffers stay for small parameters. Buffers that work in flight may still write to
// are kept, because the allocator does not know our events.
BufferPool::Dropped BufferPool::drop(std::int64_t bytes) {
  Dropped dropped;
  for (auto size = idle_.rbegin(); size != idle_.rend() && bytes > 0; ++size) {
    std::vector<Buffer>& buffers = size->second;
    for (auto buffer = buffers.begin(); buffer != buffers.end() && bytes > 0;) {
      if (buffer->free_after.passed()) {
        bytes -= buffer->bytes;
        idle_bytes_ -= buffer->bytes;
        dropped.push_back(std::move(*buffer));
        buffer = buffers.erase(buffer);
      } else {
        ++buffer;
      }
    }
  }
  return dropped;
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
