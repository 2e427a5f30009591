// Tensors over existing memory.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc {

// A contiguous tensor over `data`, which must outlive it. For the runtime's own reads and writes: cheaper than
// at::from_blob, and bypasses guards on the storage that owns the memory.
at::Tensor rawTensor(void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// A contiguous tensor that owns `data`.
at::Tensor tensorOver(c10::DataPtr data, std::int64_t bytes, at::IntArrayRef sizes, at::ScalarType dtype,
                      at::Device device);

// Another tensor over the same storage, without autograd history.
at::Tensor aliasOf(const at::Tensor& tensor);

}  // namespace dc
