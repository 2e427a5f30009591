// Every environment variable that the library reads, in one place.
#pragma once

#include <cstdint>
#include <string>

namespace dc {

struct Environment {
  // DEEPCOMPILE_CPU_STREAM = auto | inline | worker. How asynchronous work on CPU tensors is run: on the calling thread
  // at once, on a thread of its own, or chosen by what the communicator and the cores allow (docs/runtime.md).
  std::string cpu_stream = "auto";

  // DEEPCOMPILE_COMMUNICATOR = auto | c10d. What carries the runtime's collectives on CPU: shared memory where the
  // ranks share a host, or always a backend of torch.distributed.
  std::string communicator = "auto";

  // DEEPCOMPILE_LOG = error | warning | info | debug. What is written to standard error.
  std::string log = "warning";

  // DEEPCOMPILE_SHM_ONE_STEP_BYTES, DEEPCOMPILE_SHM_CHUNK_BYTES, DEEPCOMPILE_SHM_STREAMING_BYTES: sizes at which
  // shared-memory collectives change their way (docs/shm.md). Measured or known for each group when unset (-1); those
  // of rank 0 count.
  std::int64_t shm_one_step_bytes = -1;
  std::int64_t shm_chunk_bytes = -1;
  std::int64_t shm_streaming_bytes = -1;

  // DEEPCOMPILE_STREAM_DELAY_US: hold up a device's streams for random times below this many microseconds, to bring out
  // an ordering that is missing (docs/cuda.md). 0: never.
  std::int64_t stream_delay_us = 0;

  // DEEPCOMPILE_MALLOC = tuned | unchanged. Whether glibc's malloc keeps what a training step frees (docs/runtime.md).
  std::string malloc = "tuned";

  // DEEPCOMPILE_READ_IN_PLACE = auto | off. Off: ranks that share memory copy parameters and stage gradients all the
  // same, as they would on several hosts (docs/runtime.md).
  std::string read_in_place = "auto";

  // DEEPCOMPILE_OFFLOAD = auto | always. Whether states are moved to the host where the device is the host itself: a
  // copy for nothing, so that tests take the way of a device (docs/offload.md).
  std::string offload = "auto";

  // DEEPCOMPILE_SYMMETRIC_REDUCTIONS = auto | always | never. With symmetric memory: whether gradients are reduced
  // through it, too; measured for each size when the runtime is made, or as this says (docs/cuda.md).
  std::string symmetric_reductions = "auto";

  // Reads the process's environment. A value that is not listed above is an error that names the variable.
  static Environment read();
};

}  // namespace dc
