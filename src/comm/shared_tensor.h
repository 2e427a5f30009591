// Tensors in the heap that this process shares with the ranks on its host: collectives on them need no staging.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace dc {

// Storages keep the heap alive and may outlive every group. One per process, never destroyed.
const std::shared_ptr<c10::Allocator>& sharedAllocator();

// Uninitialised, contiguous.
at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype);

// Whether all elements lie in the heap of this process.
bool isShared(const at::Tensor& tensor);

}  // namespace dc
