// Pieces of shared memory under one range of addresses, one after the other: the same pages once more, no copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dc::shm {

// [data, data + bytes), inside one shared mapping.
struct SharedPiece {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

class JoinedMemory {
 public:
  // Only whole pages can be mapped a second time.
  static bool wholePages(std::int64_t offset, std::int64_t bytes);

  // What is written through either address is seen through the other. The pages live as long as any mapping of them,
  // also when the process that made them has ended. Throws when the system has no more mappings to give.
  explicit JoinedMemory(std::span<const SharedPiece> pieces);
  ~JoinedMemory();
  JoinedMemory(const JoinedMemory&) = delete;
  JoinedMemory& operator=(const JoinedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace dc::shm
