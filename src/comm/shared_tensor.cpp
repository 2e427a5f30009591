#include "deepcompile/comm/shared_tensor.h"

#include <ATen/EmptyTensor.h>

#include "deepcompile/shm/shared_heap.h"

namespace dc {
namespace {

// The context is the memory itself, as callers of raw_allocate() expect.
void freeBlock(void* memory) {
  if (shm::SharedHeap* heap = shm::SharedHeap::around(memory); heap != nullptr) {
    heap->free(static_cast<std::byte*>(memory));
  }
}

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    std::byte* const data = shm::SharedHeap::ofProcess()->allocate(static_cast<std::int64_t>(bytes));
    return {data, data, &freeBlock, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freeBlock; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

const std::shared_ptr<c10::Allocator>& sharedAllocator() {
  static const auto* allocator = new std::shared_ptr<c10::Allocator>(std::make_shared<SharedAllocator>());
  return *allocator;
}

at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, sharedAllocator().get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

bool isShared(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0) {
    return false;
  }
  // Strides are never negative, so the elements lie between the first and the end of the storage.
  const auto begin = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  const auto heap = shm::SharedHeap::ofProcessIfAny();
  return heap &&
         heap->offsetOf(tensor.const_data_ptr(), static_cast<std::int64_t>(tensor.storage().nbytes()) - begin) >= 0;
}

void trimShared() {
  if (const auto heap = shm::SharedHeap::ofProcessIfAny(); heap != nullptr) {
    heap->trim();
  }
}

}  // namespace dc
