// A runtime's configuration. The defaults here are the documented ones (docs/runtime.md).
#pragma once

#include <cstdint>

namespace dc {

struct Config {
  // Gather through symmetric memory. CUDA only; refused elsewhere.
  bool symmetric_memory = false;
  // Gather over NCCL into memory that it writes to directly. CUDA only; refused elsewhere.
  bool registered_memory = false;
  // Fill one reduce bucket while the other is being reduced.
  bool double_buffer = true;
  // Elements above which free_tensors frees an activation.
  std::int64_t free_activation_threshold = 10'000'000;
  // Wait for all work in flight before or after each operation, to find the one at fault.
  bool sync_before_reduce = false;
  bool sync_after_reduce = false;
  bool sync_before_allgather = false;
  bool sync_after_allgather = false;
  // Divide gradients by the number of ranks before the sum (no overflow in 16 bits) instead of after it.
  bool pre_div_reduce = true;
  // Seconds that any wait may take. Until the first step has ended it is kFirstStepFactor times as long, because ranks
  // compile at different speed.
  double timeout = 300;
  // Bytes of host memory that offloaded tensors and parameters may take at once; 0: no limit.
  std::int64_t offload_limit = 0;
  // Detect reads of gathered parameters before their wait or after their release, and unmatched reductions.
  bool debug = false;

  static constexpr double kFirstStepFactor = 10;
};

}  // namespace dc
