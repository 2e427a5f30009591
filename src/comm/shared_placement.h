// Tensors that are about to travel are made in the shared heap, wherever in PyTorch they are made: an allocator in
// front of PyTorch's own one for CPU memory takes those of given sizes from the heap, on threads that ask for it.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_set>

namespace dc {

using SizesInBytes = std::unordered_set<std::size_t>;

// From now on tensors of these sizes that the calling thread makes lie in the shared heap; null: none. What is made so
// needs no special care and may outlive this. Where the heap is full they lie in ordinary memory.
void placeShared(std::shared_ptr<const SizesInBytes> sizes);

}  // namespace dc
