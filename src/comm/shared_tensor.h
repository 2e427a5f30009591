// Tensors in the heap that this process shares with the ranks on its host: collectives on them need no staging.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace dc {

// What it gives out may outlive every group: heaps stay. One per process, never destroyed.
const std::shared_ptr<c10::Allocator>& sharedAllocator();

// Uninitialised, contiguous.
at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype);

// Whether all elements lie in the heap of this process.
bool isShared(const at::Tensor& tensor);

// Gives what lies idle in the heap back to the system.
void trimShared();

}  // namespace dc
