// Memory that NCCL writes the results of gathers to directly, without a stop in buffers of its own: made by NCCL and
// registered with one communicator. Giving it back stops the device, so whoever takes some keeps it
// (BufferPool::Keep::ForGood).
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_set>

#include <c10/core/Allocator.h>

#include "deepcompile/comm/nccl_api.h"

namespace dc {

class NcclMemory final : public c10::Allocator, public std::enable_shared_from_this<NcclMemory> {
 public:
  // Where the library can register memory (nccl::Api::canRegister). The communicator calls close() before it ends.
  NcclMemory(nccl::Comm* comm, c10::DeviceIndex device);
  ~NcclMemory() override = default;

  // Less than this is ordinary memory: NCCL's comes in pieces of 2 MiB, and small gathers gain nothing. The ranks
  // gather as many bytes, so all of them register a result or none does, which NCCL demands.
  static constexpr std::size_t kLeastBytes = 4 << 20;

  // Lives on when the communicator has ended.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  // Nothing is registered from now on. `orderly`: the communicator still works, and is told.
  void close(bool orderly);

 private:
  struct Block {
    std::shared_ptr<NcclMemory> owner;
    void* memory;
    void* registration;
  };
  static void giveBack(void* block);

  const c10::DeviceIndex device_;
  std::mutex mutex_;  // guards all below
  nccl::Comm* comm_;  // null when closed
  std::unordered_set<Block*> blocks_;
};

}  // namespace dc
