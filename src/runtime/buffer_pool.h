// Memory for gathered parameters: a cache of freed buffers in front of the allocator.
//
// The pool never holds more than the peak in use at once (or the limit, if that is larger): before it allocates more it
// frees idle buffers. Only buffers that work in flight may still write to are kept beyond that. The initial limit is
// small.
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
  std::int64_t stream = 0;  // on which the caller took it (currentStream); its readers are ordered on that stream
};

class BufferPool {
 public:
  // ForGood: the pool frees nothing before trim(). For memory that is slow to allocate.
  enum class Keep { AsLongAsUseful, ForGood };

  explicit BufferPool(c10::Allocator* allocator, Keep keep = Keep::AsLongAsUseful)
      : allocator_(allocator), keep_(keep) {}

  // At least `bytes` bytes. The caller orders its use after `free_after`. Reuses only buffers of the same size (layers
  // repeat their sizes) and of the same stream (on another stream the last readers may not have ended).
  Buffer take(std::int64_t bytes, std::int64_t stream = 0);
  void give(Buffer buffer);

  // Bytes that may be held, in use and idle together, even where less was ever in use at once.
  void setLimit(std::int64_t bytes);
  static constexpr std::int64_t kInitialLimit = 16 << 20;
  // Frees idle buffers, except those with work in flight.
  void trim();
  // Forgets the peak in use: from now on the pool holds no more than the peak from here on.
  void forgetMost();
  // Limits idle memory; memory above the limit is freed at once, so that other allocations can use it. kAll: no limit
  // besides the pool's own.
  void limitIdle(std::int64_t bytes);
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

  std::int64_t live() const;    // bytes in use
  std::int64_t peak() const;    // most bytes in use at once since the last resetPeak()
  std::int64_t idle() const;    // bytes kept for later
  std::int64_t taken() const;   // how often memory was asked for
  std::int64_t reused() const;  // of these, served without the allocator
  void resetCounts();

 private:
  // Buffers are freed after the lock is released: an allocator may take the GIL, whose holder may wait for this lock.
  // So functions that remove idle buffers return them to their callers.
  using Dropped = std::vector<Buffer>;
  Dropped makeRoom(std::int64_t bytes);
  // An idle buffer of this size, if there is one.
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
  std::int64_t most_live_ = 0;  // since the start or forgetMost(): the most that the pool may hold
  std::int64_t peak_ = 0;
  std::int64_t limit_ = kInitialLimit;
  std::int64_t most_idle_ = kAll;
  std::int64_t taken_ = 0;
  std::int64_t reused_ = 0;
};

}  // namespace dc
