// How a rank writes the memory that its peers read next.
//
// Before a core can write a line that another core has read, it must take the line back. Cores that share a cache do
// that in a few nanoseconds; cores that do not may need fifty for each line, one after the other, and stores past the
// caches are then many times faster, though slower where the caches are shared. Which of the two it is can change while
// a program runs: a hypervisor moves its processors about. So a rank keeps measuring, and decides for itself; what it
// writes is the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dc::shm {

enum class Staging : std::uint8_t { Adaptive, Cached, PastCaches };

class StagingChoice {
 public:
  // Smaller messages take what larger ones have found out.
  static constexpr std::int64_t kLeastBytes = 4 << 10;

  // Now and then times writes to the first kLeastBytes of `slot`, which are about to be written anyway and which peers
  // have read when they were written last.
  void probe(std::byte* slot);
  bool pastCaches() const { return past_caches_; }

 private:
  bool past_caches_ = false;
  int until_probe_ = 0;
};

}  // namespace dc::shm
