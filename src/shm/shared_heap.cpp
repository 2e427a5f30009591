#include "deepcompile/shm/shared_heap.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/layout.h"
#include "deepcompile/shm/random_hex.h"

namespace dc::shm {
namespace {

const std::int64_t kPage = ::sysconf(_SC_PAGESIZE);
constexpr std::int64_t kGrowth = std::int64_t{4} << 20;  // pages are taken in steps of this
constexpr std::int64_t kSlack = std::int64_t{64} << 20;  // free memory at the end beyond this goes back to the system

std::int64_t roundUp(std::int64_t bytes, std::int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

struct SharedHeap::OfProcess {
  std::mutex mutex;
  std::shared_ptr<SharedHeap> heap;
  std::vector<std::shared_ptr<SharedHeap>> inherited;  // a forked child has tensors in its parents' heaps, too

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
    if (process.heap != nullptr) {
      process.inherited.push_back(std::move(process.heap));
    }
    process.heap = std::make_shared<SharedHeap>(roundUp(memory, kGrowth));
  }
  return process.heap;
}

std::shared_ptr<SharedHeap> SharedHeap::ofProcessIfAny() {
  OfProcess& process = OfProcess::instance();
  const std::lock_guard lock(process.mutex);
  return process.made() ? process.heap : nullptr;
}

SharedHeap* SharedHeap::around(const void* data) {
  OfProcess& process = OfProcess::instance();
  const std::lock_guard lock(process.mutex);
  if (process.heap != nullptr && process.heap->offsetOf(data, 1) >= 0) {
    return process.heap.get();
  }
  for (const auto& heap : process.inherited) {
    if (heap->offsetOf(data, 1) >= 0) {
      return heap.get();
    }
  }
  return nullptr;
}

SharedHeap::SharedHeap(std::int64_t capacity)
    : segment_(Segment::sparse("tensors", capacity)), id_(randomHex()), owner_(::getpid()) {}

std::byte* SharedHeap::allocate(std::int64_t bytes) {
  check(bytes >= 0, "an allocation needs a size of zero or more bytes");
  // Large blocks are whole pages, so that they can be mapped a second time (JoinedMemory).
  const std::int64_t unit = bytes >= kPage ? kPage : kLine;
  const std::int64_t size = roundUp(std::max<std::int64_t>(bytes, 1), unit);
  const std::lock_guard lock(mutex_);
  // The smallest block that fits keeps large ones whole.
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const std::int64_t room = block->first + block->second.bytes - roundUp(block->first, unit);
    if (room >= size && (best == free_.end() || block->second.bytes < best->second.bytes)) {
      best = block;
    }
  }
  std::int64_t begin = roundUp(end_, unit);
  if (best != free_.end()) {
    const auto [first, block] = *best;
    begin = roundUp(first, unit);
    if (!block.whole) {
      const std::int64_t page = begin / kPage * kPage;
      segment_.populate(page, roundUp(begin + size, kPage) - page);
    }
    free_.erase(best);
    if (begin > first) {
      free_.emplace(first, FreeBlock{begin - first, block.whole});
    }
    if (const std::int64_t rest = first + block.bytes - (begin + size); rest > 0) {
      free_.emplace(begin + size, FreeBlock{rest, block.whole});
    }
  } else {
    check(begin + size <= segment_.size(), [&] {
      return concat("the heap of shared tensors is full: ", bytes, " bytes asked for, ", allocated_, " of ",
                    segment_.size(), " in use");
    });
    if (begin + size > populated_) {
      const std::int64_t target = std::min(roundUp(begin + size, kGrowth), segment_.size());
      segment_.populate(populated_, target - populated_);
      populated_ = target;
    }
    if (begin > end_) {
      free_.emplace(end_, FreeBlock{begin - end_});  // below it lies a block that is in use, or the beginning
    }
    end_ = begin + size;
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
  release(begin, {bytes});
}

void SharedHeap::retire(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto after = used_.upper_bound(static_cast<const std::byte*>(data) - segment_.data());
  if (after != used_.begin()) {
    retired_.insert(std::prev(after)->first);
  }
}

void SharedHeap::release(std::int64_t begin, FreeBlock block) {
  const auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == begin + block.bytes) {
    block.bytes += after->second.bytes;
    block.whole = block.whole && after->second.whole;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == begin) {
      begin = before->first;
      block.bytes += before->second.bytes;
      block.whole = block.whole && before->second.whole;
      free_.erase(before);
    }
  }
  if (begin + block.bytes < end_) {
    free_.emplace(begin, block);
    return;
  }
  end_ = begin;
  // What lies above end_ is to have pages up to populated_: where some are missing they all go.
  shrink(block.whole ? kSlack : 0);
}

void SharedHeap::shrink(std::int64_t slack) {
  const std::int64_t keep = roundUp(end_ + slack, slack > 0 ? kGrowth : kPage);
  if (populated_ > keep) {
    segment_.discard(keep, populated_ - keep);
    populated_ = keep;
  }
}

void SharedHeap::trim() {
  const std::lock_guard lock(mutex_);
  shrink(0);
  for (auto& [begin, block] : free_) {
    const std::int64_t first = roundUp(begin, kPage);
    const std::int64_t last = (begin + block.bytes) / kPage * kPage;
    if (block.whole && first < last) {
      segment_.discard(first, last - first);
      block.whole = false;
    }
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
