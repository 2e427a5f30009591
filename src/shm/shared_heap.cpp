#include "deepcompile/shm/shared_heap.h"

#include <unistd.h>

#include <algorithm>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/layout.h"
#include "deepcompile/shm/random_hex.h"

namespace dc::shm {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kGrowth = std::int64_t{4} << 20;  // pages are taken in steps of this
constexpr std::int64_t kSlack = std::int64_t{64} << 20;  // free memory at the end beyond this goes back to the system

std::int64_t roundUp(std::int64_t bytes, std::int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

struct SharedHeap::OfProcess {
  std::mutex mutex;
  std::shared_ptr<SharedHeap> heap;

  static OfProcess& instance() {
    static auto* instance = new OfProcess;  // tensors may outlive static objects
    return *instance;
  }
  bool made() const { return heap && heap->owner_ == ::getpid(); }
};

std::shared_ptr<SharedHeap> SharedHeap::ofProcess() {
  OfProcess& process = OfProcess::instance();
  const std::lock_guard lock(process.mutex);
  if (!process.made()) {
    const std::int64_t memory = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
    process.heap = std::make_shared<SharedHeap>(roundUp(memory, kGrowth));
  }
  return process.heap;
}

std::shared_ptr<SharedHeap> SharedHeap::ofProcessIfAny() {
  OfProcess& process = OfProcess::instance();
  const std::lock_guard lock(process.mutex);
  return process.made() ? process.heap : nullptr;
}

SharedHeap::SharedHeap(std::int64_t capacity)
    : segment_(Segment::sparse("tensors", capacity)), id_(randomHex()), owner_(::getpid()) {}

std::byte* SharedHeap::allocate(std::int64_t bytes) {
  check(bytes >= 0, "an allocation needs a size of zero or more bytes");
  const std::int64_t size = roundUp(std::max<std::int64_t>(bytes, 1), bytes >= kPage ? kPage : kLine);
  const std::lock_guard lock(mutex_);
  // The smallest block that fits keeps large ones whole.
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second >= size && (best == free_.end() || block->second < best->second)) {
      best = block;
    }
  }
  std::int64_t begin = end_;
  if (best != free_.end()) {
    begin = best->first;
    const std::int64_t rest = best->second - size;
    free_.erase(best);
    if (rest > 0) {
      free_.emplace(begin + size, rest);
    }
  } else {
    check(size <= segment_.size() - end_, [&] {
      return concat("the heap of shared tensors is full: ", bytes, " bytes asked for, ", allocated_, " of ",
                    segment_.size(), " in use");
    });
    if (end_ + size > populated_) {
      const std::int64_t target = std::min(roundUp(end_ + size, kGrowth), segment_.size());
      segment_.populate(populated_, target - populated_);
      populated_ = target;
    }
    end_ += size;
  }
  used_.emplace(begin, size);
  allocated_ += size;
  return segment_.data() + begin;
}

void SharedHeap::free(std::byte* block) {
  // A forked child holds copies of its parent's tensors, but the memory is still the parent's.
  if (::getpid() != owner_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(block - segment_.data());
  check(used != used_.end(), "freed what the heap of shared tensors did not allocate");
  if (retired_.contains(used->first)) {
    return;
  }
  const auto [begin, bytes] = *used;
  used_.erase(used);
  allocated_ -= bytes;
  release(begin, bytes);
}

void SharedHeap::retire(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto after = used_.upper_bound(static_cast<const std::byte*>(data) - segment_.data());
  if (after != used_.begin()) {
    retired_.insert(std::prev(after)->first);
  }
}

void SharedHeap::release(std::int64_t begin, std::int64_t bytes) {
  const auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == begin + bytes) {
    bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (begin + bytes < end_) {
    free_.emplace(begin, bytes);
    return;
  }
  end_ = begin;
  const std::int64_t keep = roundUp(end_ + kSlack, kGrowth);
  if (populated_ > keep) {
    segment_.discard(keep, populated_ - keep);
    populated_ = keep;
  }
}

std::int64_t SharedHeap::allocated() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

std::int64_t SharedHeap::populated() const {
  const std::lock_guard lock(mutex_);
  return populated_;
}

}  // namespace dc::shm
