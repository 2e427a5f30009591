// Host memory for offloaded tensors: pinned if the device is not the CPU, and reused.
//
// Pinning memory takes about as long as filling it, so a copy's memory returns to a pool. The pool may hand it out
// while work still uses it: the next writer is ordered after that work, on its stream, and the host does not wait.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class HostCopies {
 public:
  // `limit`: bytes that copies may take at once; 0: no limit.
  HostCopies(at::Device device, std::int64_t limit);

  // Host memory in the layout of `tensor`, without gaps. Work given to `writer` from now on is ordered after the
  // earlier users of the memory, which returns to the pool with the last tensor over it. If there is no memory, an
  // error that names the bytes.
  at::Tensor take(const at::Tensor& tensor, Stream& writer, Deadline deadline);
  // An alias of a copy for work on a stream. It does not keep the memory out of the pool (usedUntil()'s event protects
  // it), only the pool alive. For a tensor that take() did not make it is the tensor itself.
  struct InFlight {
    at::Tensor tensor;
    std::shared_ptr<BufferPool> pool;
  };
  static InFlight inFlight(const at::Tensor& copy);
  // Marks the memory of `copy` as in use until `event` has passed. Does nothing for a tensor that take() did not make.
  static void usedUntil(const at::Tensor& copy, Event event);

  const BufferPool& pool() const { return *pool_; }

 private:
  const bool pinned_;
  const std::int64_t limit_;
  const std::shared_ptr<BufferPool> pool_;
};

}  // namespace dc
