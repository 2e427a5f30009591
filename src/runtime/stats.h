// Counters of a runtime. Written by any thread, read by dc.stats().
#pragma once

#include <atomic>
#include <cstdint>

namespace dc {

struct Stats {
  std::atomic<std::int64_t> gathers_launched{0};     // parameters whose gather was started
  std::atomic<std::int64_t> gathers_fused{0};        // of these, started together with others
  std::atomic<std::int64_t> gathers_in_place{0};     // of the launched: read where the shards lie, nothing was moved
  std::atomic<std::int64_t> gathers_reused{0};       // served by a copy that was still valid
  std::atomic<std::int64_t> gathers_in_backward{0};  // of the launched: again for what autograd had saved
  std::atomic<std::int64_t> releases{0};             // gathered copies whose storage was freed
  std::atomic<std::int64_t> gradients_reduced{0};
  std::atomic<std::int64_t> gradients_missing{0};   // zeros contributed for a parameter without a gradient
  std::atomic<std::int64_t> gradients_parked{0};    // arrived out of order and were held back
  std::atomic<std::int64_t> gradients_in_place{0};  // reduced from where they lay, not copied into a bucket
  std::atomic<std::int64_t> buckets_flushed{0};
  std::atomic<std::int64_t> backwards_left_running{0};  // that ended without a wait for their reductions
  std::atomic<std::int64_t> activations_freed{0};
  std::atomic<std::int64_t> bytes_offloaded{0};
  std::atomic<std::int64_t> bytes_reloaded{0};
  std::atomic<std::int64_t> waits{0};             // waits of the caller on asynchronous work
  std::atomic<std::int64_t> wait_nanoseconds{0};  // and the time it was blocked in them
};

}  // namespace dc
