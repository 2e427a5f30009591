// Memory that takes part in a collective: runs of bytes that need not lie together. What several runs hold, one after
// the other, is moved as if it were one piece, so that a group of tensors needs no packing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {

struct Run {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

// For sources; nothing is written through it.
inline Run run(const void* data, std::int64_t bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), bytes};
}

using Runs = std::span<const Run>;

inline std::int64_t bytesOf(Runs runs) {
  std::int64_t bytes = 0;
  for (const Run& run : runs) {
    bytes += run.bytes;
  }
  return bytes;
}

// For every rank a list of runs, in one array. Reused: `clear` keeps the memory. Fill rank by rank, from 0 up.
class RunTable {
 public:
  void clear() {
    runs_.clear();
    ends_.clear();
  }
  void add(const void* data, std::int64_t bytes) { runs_.push_back(run(data, bytes)); }
  void endRank() { ends_.push_back(runs_.size()); }

  int ranks() const { return static_cast<int>(ends_.size()); }
  // All runs, and where those of a rank begin among them.
  Runs all() const { return runs_; }
  std::size_t begin(int rank) const { return rank == 0 ? 0 : ends_[static_cast<std::size_t>(rank) - 1]; }
  Runs operator[](int rank) const {
    return all().subspan(begin(rank), ends_[static_cast<std::size_t>(rank)] - begin(rank));
  }

 private:
  std::vector<Run> runs_;
  std::vector<std::size_t> ends_;
};

// Walks over runs in pieces of any size.
class Cursor {
 public:
  explicit Cursor(Runs runs) : runs_(runs) {}

  // Calls piece(data, bytes) for each contiguous part of the next `bytes` bytes, or of as many as are left.
  template <typename Piece>
  void take(std::int64_t bytes, Piece&& piece) {
    while (bytes > 0 && index_ < runs_.size()) {
      const Run& run = runs_[index_];
      const std::int64_t size = std::min(bytes, run.bytes - used_);
      if (size > 0) {
        piece(run.data + used_, size);
      }
      bytes -= size;
      used_ += size;
      if (used_ == run.bytes) {
        ++index_;
        used_ = 0;
      }
    }
  }

 private:
  Runs runs_;
  std::size_t index_ = 0;
  std::int64_t used_ = 0;
};

// Copies up to `bytes` bytes to where the cursor stands. Memory that is copied onto itself is left alone.
inline void copyInto(Cursor& to, const std::byte* from, std::int64_t bytes, bool streaming = false) {
  to.take(bytes, [&](std::byte* data, std::int64_t size) {
    if (data != from) {
      copyBytes(data, from, size, streaming);
    }
    from += size;
  });
}

// The other way.
inline void copyOut(std::byte* to, Cursor& from, std::int64_t bytes, bool streaming) {
  from.take(bytes, [&](std::byte* data, std::int64_t size) {
    copyBytes(to, data, size, streaming);
    to += size;
  });
}

// `tag`, changed by the sizes of the ranks' parts where those differ: ranks must agree on them too.
inline std::uint64_t mix(std::uint64_t tag, const RunTable& parts) {
  bool even = true;
  std::uint64_t hash = 14695981039346656037u;
  for (int r = 0; r < parts.ranks(); ++r) {
    even = even && bytesOf(parts[r]) == bytesOf(parts[0]);
    hash = (hash ^ static_cast<std::uint64_t>(bytesOf(parts[r]))) * 1099511628211u;
  }
  return even ? tag : tag ^ hash;
}

}  // namespace dc::shm
