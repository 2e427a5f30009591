#include "deepcompile/shm/staging.h"

#include <atomic>
#include <chrono>

#include "deepcompile/shm/layout.h"

namespace dc::shm {
namespace {

constexpr int kLines = 32;             // of 64 bytes, that a probe writes
constexpr int kProbesWhileCached = 4;  // every so many slots: noticing late costs much, a probe little
constexpr int kProbesWhilePastCaches = 8;

}  // namespace

void StagingChoice::probe(std::byte* slot, double slow) {
  if (--until_probe_ > 0) {
    return;
  }
  const auto started = std::chrono::steady_clock::now();
  for (int line = 0; line < kLines; ++line) {
    *static_cast<volatile std::byte*>(slot + line * 64) = std::byte{0};
  }
  // The stores are done, not only issued.
  std::atomic<int> fence = 0;  // thread sanitizer knows no other
  fence.fetch_add(1, std::memory_order_seq_cst);
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - started;
  nanoseconds_ = taken.count() / kLines;
  past_caches_ = nanoseconds_ > slow;
  until_probe_ = past_caches_ ? kProbesWhilePastCaches : kProbesWhileCached;
}

}  // namespace dc::shm
