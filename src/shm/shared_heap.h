// Memory of this process that its peers can read and write: collectives on tensors that lie here need no staging.
//
// One heap per process, because tensors outlive groups and belong to several. Its descriptor is handed to every peer
// when a group is set up, so that later allocations are local calls and no collectives.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "deepcompile/shm/segment.h"

namespace dc::shm {

class SharedHeap {
 public:
  // The heap of this process; a forked child gets one of its own.
  static std::shared_ptr<SharedHeap> ofProcess();

  // The same where it has been made already, or nothing.
  static std::shared_ptr<SharedHeap> ofProcessIfAny();

  // The heap of this process or, in a forked child, of one that it came from, in which `data` lies; null: none.
  static SharedHeap* around(const void* data);

  // `capacity` is address space; memory is taken as it is allocated.
  explicit SharedHeap(std::int64_t capacity);

  // Memory that exists: throws when there is not enough, and says how much is. Aligned to 128 bytes, from a
  // page's size on to pages.
  std::byte* allocate(std::int64_t bytes);
  void free(std::byte* block);
  // Gives the memory of all free blocks back to the system; later allocations take it again.
  void trim();
  // The block around `data` is never used again, also when it is freed: a peer may still write there.
  void retire(const void* data);

  // Where [data, data + bytes) lies in the heap, or -1 when it does not.
  std::int64_t offsetOf(const void* data, std::int64_t bytes) const {
    const auto offset = reinterpret_cast<std::intptr_t>(data) - reinterpret_cast<std::intptr_t>(segment_.data());
    return offset >= 0 && offset + bytes <= segment_.size() ? offset : -1;
  }

  // Tells this heap from every other.
  const std::string& id() const { return id_; }
  std::byte* base() const { return segment_.data(); }
  int descriptor() const { return segment_.descriptor(); }
  std::int64_t capacity() const { return segment_.size(); }
  std::int64_t allocated() const;  // bytes in blocks that are in use
  std::int64_t populated() const;  // bytes of memory that the heap holds

 private:
  struct OfProcess;
  struct FreeBlock {
    std::int64_t bytes = 0;
    bool whole = true;  // false: pages of it have gone back to the system
  };
  void release(std::int64_t begin, FreeBlock block);
  // Memory above the last block goes back to the system, except `slack` bytes.
  void shrink(std::int64_t slack);

  Segment segment_;
  const std::string id_;
  const pid_t owner_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, FreeBlock> free_;     // by begin; below end_, never adjacent
  std::map<std::int64_t, std::int64_t> used_;  // begin -> bytes
  std::set<std::int64_t> retired_;             // of used_
  std::int64_t end_ = 0;                       // no block lies above
  std::int64_t populated_ = 0;                 // [0, populated_) has pages, except where free blocks are not whole
  std::int64_t allocated_ = 0;
};

}  // namespace dc::shm
