#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/log.h"
#include "deepcompile/comm/nccl_memory.h"

namespace dc {

using nccl::Api;

NcclMemory::NcclMemory(nccl::Comm* comm, c10::DeviceIndex device) : device_(device), comm_(comm) {}

c10::DataPtr NcclMemory::allocate(std::size_t bytes) {
  if (bytes < kLeastBytes) {
    return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  }
  const c10::cuda::CUDAGuard device(device_);
  auto block = std::make_unique<Block>(Block{shared_from_this(), nullptr, nullptr});
  if (Api::get().memAlloc(&block->memory, bytes) != 0) {
    c10::cuda::CUDACachingAllocator::emptyCache();  // PyTorch keeps what nobody uses
    nccl::check(Api::get().memAlloc(&block->memory, bytes), "ncclMemAlloc");
  }
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) {
    if (const int result = Api::get().commRegister(comm_, block->memory, bytes, &block->registration); result != 0) {
      Api::get().memFree(block->memory);
      nccl::check(result, "ncclCommRegister");
    }
  }
  blocks_.insert(block.get());
  void* const memory = block->memory;
  return {memory, block.release(), &NcclMemory::giveBack, at::Device(at::kCUDA, device_)};
}

// The device may be at work on the memory, and NCCL takes it away at once. Nothing can be thrown here, and a device
// that has failed must not keep the rest from being done.
void NcclMemory::giveBack(void* given) {
  const std::unique_ptr<Block> block(static_cast<Block*>(given));
  NcclMemory& owner = *block->owner;
  const auto warn = [](bool failed, const char* operation) {
    if (failed) {
      log(LogLevel::Warning, concat("while giving registered memory back: ", operation, " failed"));
    }
  };
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(owner.device_);
  warn(cudaDeviceSynchronize() != cudaSuccess, "cudaDeviceSynchronize");
  {
    const std::lock_guard lock(owner.mutex_);
    owner.blocks_.erase(block.get());
    if (owner.comm_ != nullptr && block->registration != nullptr) {
      warn(Api::get().commDeregister(owner.comm_, block->registration) != 0, "ncclCommDeregister");
    }
  }
  warn(Api::get().memFree(block->memory) != 0, "ncclMemFree");
  cudaSetDevice(before);
}

void NcclMemory::copy_data(void* to, const void* from, std::size_t bytes) const {
  c10::cuda::CUDACachingAllocator::get()->copy_data(to, from, bytes);
}

void NcclMemory::close(bool orderly) {
  const std::lock_guard lock(mutex_);
  nccl::Comm* const comm = std::exchange(comm_, nullptr);
  for (Block* block : blocks_) {
    void* const registration = std::exchange(block->registration, nullptr);
    if (orderly && comm != nullptr && registration != nullptr) {
      Api::get().commDeregister(comm, registration);
    }
  }
}

}  // namespace dc
