// Anonymous shared memory. It has no name that could be left behind, guessed or taken by another job: only a process
// that was handed the descriptor can map it, and the kernel frees it with the last of them, however that one ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/descriptor.h"

namespace dc::shm {

// The system refuses this process shared memory as such (a filter of system calls, a limit of its address space). The
// ranks can go on without it.
class Unavailable : public Error {
 public:
  using Error::Error;
};

class Segment {
 public:
  // Reserved: every page exists when this returns, so that later writes cannot fail. `purpose` says in errors and in
  // /proc/PID/maps what the memory is for.
  static Segment reserve(const std::string& purpose, std::int64_t bytes);
  // Address space without memory; pages come with `populate`.
  static Segment sparse(const std::string& purpose, std::int64_t bytes);
  // The memory behind a descriptor that another process handed over. The descriptor is closed: the mapping needs none.
  static Segment map(Descriptor descriptor);

  Segment() = default;
  Segment(Segment&& other) noexcept { *this = std::move(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }
  int descriptor() const { return descriptor_.get(); }
  // For segments that are handed to nobody any more.
  void closeDescriptor() { descriptor_ = Descriptor(); }

  // Makes the pages of [begin, begin + bytes) exist; throws when there is not enough memory. For sparse segments.
  void populate(std::int64_t begin, std::int64_t bytes);
  // Gives the pages of that range back to the system; their contents are lost.
  void discard(std::int64_t begin, std::int64_t bytes);

 private:
  Segment(std::string purpose, Descriptor descriptor, std::int64_t size, bool populated);

  std::string purpose_;
  Descriptor descriptor_;
  std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
};

// Bytes that this process may still take before the machine or its control group runs out of memory.
std::int64_t availableMemory();
// The same of a control group (version 2) alone; the largest number where it has no limit.
std::int64_t availableInControlGroup(const std::string& directory);

}  // namespace dc::shm
