// Memory for gathered parameters: taken, given back and used again, without going to the allocator each time.
//
// The pool never holds more than the most that was in use at once (or the limit, where that is larger): before it asks
// the allocator for more it gives back what lies idle. Only memory that work in flight may still write to is kept
// beyond that. The limit starts at an amount that no one misses.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Allocator.h>

#include "deepcompile/runtime/stream.h"

namespace dc {

// A piece of memory with one owner. Work on it may still be in flight until `free_after` has passed.
struct Buffer {
  c10::DataPtr memory;
  std::int64_t bytes = 0;
  Event free_after;
  std::int64_t stream = 0;  // of the caller who took it (currentStream); what reads it is in its order
};

class BufferPool {
 public:
  // ForGood: what the pool has taken it keeps until trim(), whatever else it is told. For memory that is dear to make.
  enum class Keep { AsLongAsUseful, ForGood };

  explicit BufferPool(c10::Allocator* allocator, Keep keep = Keep::AsLongAsUseful)
      : allocator_(allocator), keep_(keep) {}

  // At least `bytes` bytes. The caller orders its use after `free_after`. Only buffers of the same size are used again:
  // layers repeat their sizes. And only on the same stream: on another one their last readers may not have ended.
  Buffer take(std::int64_t bytes, std::int64_t stream = 0);
  void give(Buffer buffer);

  // Bytes that may be held, in use and idle together, even where less was ever in use at once.
  void setLimit(std::int64_t bytes);
  static constexpr std::int64_t kInitialLimit = 16 << 20;
  // Gives the idle memory back to the allocator, except where work is in flight on it.
  void trim();
  // What was in use at once until now counts no more: the pool holds no more than will be from now on.
  void forgetMost();
  // No more than `bytes` lie idle; what nobody uses beyond that goes back to the allocator at once, for whatever else
  // needs some meanwhile. kAll: as many as the pool may hold.
  void limitIdle(std::int64_t bytes);
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

  std::int64_t live() const;    // bytes in use
  std::int64_t peak() const;    // most bytes in use at once since the last resetPeak()
  std::int64_t idle() const;    // bytes kept for later
  std::int64_t taken() const;   // how often memory was asked for
  std::int64_t reused() const;  // of these, served without the allocator
  void resetCounts();

 private:
  // Memory goes back to the allocator when the lock is free again: an allocator may want Python's, whose holder may
  // want this one. So what drops idle buffers hands them on.
  using Dropped = std::vector<Buffer>;
  Dropped makeRoom(std::int64_t bytes);
  // Takes an idle one out of the list of its size; nothing where there is none.
  std::optional<Buffer> reuse(std::int64_t bytes, std::int64_t stream);
  Dropped dropIdle(std::int64_t bytes);
  Dropped drop(std::int64_t bytes);
  void countTaken(const Buffer& buffer);

  c10::Allocator* const allocator_;
  const Keep keep_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::vector<Buffer>> idle_;  // by size
  std::int64_t live_ = 0;
  std::int64_t idle_bytes_ = 0;
  std::int64_t most_live_ = 0;  // over the pool's whole life: what it may hold
  std::int64_t peak_ = 0;
  std::int64_t limit_ = kInitialLimit;
  std::int64_t most_idle_ = kAll;
  std::int64_t taken_ = 0;
  std::int64_t reused_ = 0;
};

}  // namespace dc
