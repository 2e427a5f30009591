// A kernel that is launched by the driver's own function. The runtime's looks the kernel up by its symbol and the
// stream by its thread every time; of a launch that the host pays one by one that is a tenth to a fifth.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace dc::cuda {

class DriverKernel {
 public:
  // `kernel`: what stands before <<<>>>; it takes one argument.
  explicit DriverKernel(const void* kernel) : kernel_(kernel) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void* function = nullptr;
    constexpr unsigned kVersion = 12000;
    if (cudaGetDriverEntryPointByVersion("cuLaunchKernel", &function, kVersion, cudaEnableDefault, &found) ==
            cudaSuccess &&
        found == cudaDriverEntryPointSuccess) {
      launch_ = reinterpret_cast<Launch>(function);
    }
  }

  // On the current device; `argument` is read before this returns.
  cudaError_t launch(int blocks, int threads, void* argument, cudaStream_t stream) {
    void* arguments[] = {argument};
    int device = 0;
    if (launch_ != nullptr && cudaGetDevice(&device) == cudaSuccess && device < kDevices) {
      std::atomic<cudaFunction_t>& loaded = loaded_[static_cast<std::size_t>(device)];
      cudaFunction_t function = loaded.load(std::memory_order_acquire);
      if (function == nullptr) {
        if (const cudaError_t error = cudaGetFuncBySymbol(&function, kernel_); error != cudaSuccess) {
          return error;
        }
        loaded.store(function, std::memory_order_release);
      }
      const CUresult result = launch_(function, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1,
                                      1, 0, stream, arguments, nullptr);
      if (result != CUDA_ERROR_INVALID_CONTEXT) {
        return static_cast<cudaError_t>(result);  // they have the same numbers
      }
      // The runtime has not been used by this thread yet; it makes the device's context the current one.
    }
    return cudaLaunchKernel(kernel_, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                            arguments, 0, stream);
  }

 private:
  using Launch = decltype(&cuLaunchKernel);
  static constexpr int kDevices = 64;

  const void* const kernel_;
  Launch launch_ = nullptr;
  std::array<std::atomic<cudaFunction_t>, kDevices> loaded_{};  // by device
};

}  // namespace dc::cuda
