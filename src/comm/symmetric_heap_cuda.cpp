#include <algorithm>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/symmetric_heap.h"

namespace dc {

namespace symmetric = c10d::symmetric_memory;

SymmetricHeap::SymmetricHeap(std::string group_name, at::Device device)
    : name_(std::move(group_name)), device_(device) {
  check(symmetric::has_allocator(device.type()), "this PyTorch has no symmetric memory for CUDA");
}

at::Tensor SymmetricHeap::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::int64_t bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t room = std::max<std::int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  const std::lock_guard lock(mutex_);
  if (blocks_.empty() || blocks_.back().used + room > blocks_.back().memory.numel()) {
    blocks_.push_back(
        {symmetric::empty_strided_p2p({std::max(room, kBlockBytes)}, {1}, at::kByte, device_, name_, std::nullopt)});
  }
  Block& block = blocks_.back();
  void* const memory = static_cast<char*>(block.memory.mutable_data_ptr()) + block.used;
  block.used += room;
  // A storage of its own, so that whoever saves or measures the tensor sees its bytes alone; the block lives as long.
  return at::from_blob(
      memory, sizes, [keep = block.memory](void*) {}, at::TensorOptions().dtype(dtype).device(device_));
}

std::optional<SymmetricHeap::Place> SymmetricHeap::find(const void* memory) const {
  const auto* const wanted = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex_);
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const auto* const begin = static_cast<const char*>(blocks_[b].memory.const_data_ptr());
    if (wanted >= begin && wanted < begin + blocks_[b].used) {
      return Place{b, wanted - begin};
    }
  }
  return std::nullopt;
}

symmetric::SymmetricMemory& SymmetricHeap::shared(std::size_t block) {
  const std::lock_guard lock(mutex_);
  Block& found = blocks_.at(block);
  if (found.shared == nullptr) {
    found.shared = symmetric::rendezvous(found.memory, name_);
    check(found.shared != nullptr, "the ranks cannot read each other's memory; set symmetric_memory to false");
  }
  return *found.shared;
}

}  // namespace dc
