// The few kernels of the runtime itself. By default they are calls of ATen; a device's library registers faster ones.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc {

// Copies the elements of `from` to `to`, in order, and casts if the dtypes differ. Both have as many elements and are
// on one device; `to` is contiguous.
struct CopyPart {
  at::Tensor to;
  at::Tensor from;
};

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  // Enqueued on the current stream, in as few launches as possible.
  virtual void copy(std::span<const CopyPart> parts) = 0;
  // The sum of the squares of all elements, as a 64-bit number on their device; deterministic. Null if there is no
  // kernel for these tensors.
  virtual std::optional<at::Tensor> sumOfSquares(std::span<const at::Tensor> tensors) = 0;
  // Delays the current stream of `device` by about this long.
  virtual void delay(at::Device device, std::int64_t microseconds) = 0;
};

// Registers the kernels of a device type in place of ATen's; null removes them. Called when a library is loaded, while
// no other thread uses the kernels.
void setDeviceKernels(at::DeviceType type, DeviceKernels* kernels);

void copyParts(std::span<const CopyPart> parts);
// Copies one part by ATen.
void copyElements(const CopyPart& part);

// See DeviceKernels. For floating-point and complex tensors on `device`; accumulates in at least 32 bits.
at::Tensor sumOfSquares(const std::vector<at::Tensor>& tensors, at::Device device);

// With DEEPCOMPILE_STREAM_DELAY_US=n delays the current stream by a random time below n microseconds, so that a missing
// ordering between streams shows as wrong results.
void delayForDebugging(at::Device device);

}  // namespace dc
