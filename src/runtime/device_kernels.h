// The few kernels that the runtime has of its own. On CPU they are calls of ATen; a device's library brings better
// ones.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc {

// `to` becomes `from`, cast where the dtypes differ: as many elements, one after the other in the order of their own
// shapes. On one device; `to` is contiguous.
struct CopyPart {
  at::Tensor to;
  at::Tensor from;
};

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  // In the order of the current stream, in as few launches as possible.
  virtual void copy(std::span<const CopyPart> parts) = 0;
  // The sum of the squares of all elements, as a 64-bit number on their device: the same bits every time. Null where
  // there is no kernel for these tensors.
  virtual std::optional<at::Tensor> sumOfSquares(std::span<const at::Tensor> tensors) = 0;
  // Holds up the current stream of `device` for about this long.
  virtual void delay(at::Device device, std::int64_t microseconds) = 0;
};

// The kernels of a device's library take the place of ATen's for its device type; null takes them away. Not while
// others use them: when the library is loaded.
void setDeviceKernels(at::DeviceType type, DeviceKernels* kernels);

void copyParts(std::span<const CopyPart> parts);
// One part, by ATen.
void copyElements(const CopyPart& part);

// Of floating-point and complex tensors on `device`, in at least 32 bits each; a 64-bit number on `device`.
at::Tensor sumOfSquares(const std::vector<at::Tensor>& tensors, at::Device device);

// With DEEPCOMPILE_STREAM_DELAY_US=n the current stream is held up for a random time below n microseconds: a program
// that lacks an ordering then gives other results.
void delayForDebugging(at::Device device);

}  // namespace dc
