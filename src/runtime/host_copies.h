// Host memory for what leaves the device: pinned where the device is not the host itself, taken from the system once
// and used again.
//
// Pinning memory costs the host about as long as filling it, so a copy's memory goes back to a pool. It may be written
// again while an earlier copy is still on its way: the next writer is ordered after that, on its stream, and the host
// waits for nothing.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class HostCopies {
 public:
  // `limit`: bytes that copies may take at once; 0: as many as there are.
  HostCopies(at::Device device, std::int64_t limit);

  // Host memory in the layout of `tensor`, without its gaps. What `writer` is given from now on is ordered after
  // whoever used the memory before. The memory goes back with the last tensor over it. An error that names the bytes
  // where there is none.
  at::Tensor take(const at::Tensor& tensor, Stream& writer, Deadline deadline);
  // The same elements for work on a stream: the memory is used again only after usedUntil()'s event, so the work need
  // not keep it. It keeps the pool. A tensor that take() did not make is kept itself.
  struct InFlight {
    at::Tensor tensor;
    std::shared_ptr<BufferPool> pool;
  };
  static InFlight inFlight(const at::Tensor& copy);
  // The memory of `copy` is in use until `event` has passed. Nothing for a tensor that take() did not make.
  static void usedUntil(const at::Tensor& copy, Event event);

  const BufferPool& pool() const { return *pool_; }

 private:
  const bool pinned_;
  const std::int64_t limit_;
  const std::shared_ptr<BufferPool> pool_;
};

}  // namespace dc
