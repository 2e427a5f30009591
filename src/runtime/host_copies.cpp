#include "deepcompile/runtime/host_copies.h"

#include <exception>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/CPUAllocator.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {
namespace {

c10::Allocator* hostAllocatorFor(at::Device device) {
  return device.is_cpu() ? c10::GetCPUAllocator() : at::globalContext().getPinnedMemoryAllocator(device.type());
}

// The context of the copy's data pointer.
struct CopyOwner {
  std::shared_ptr<BufferPool> pool;
  Buffer buffer;
};

void giveCopyBack(void* context) {
  auto* owner = static_cast<CopyOwner*>(context);
  owner->pool->give(std::move(owner->buffer));
  delete owner;
}

// Null for a tensor, or a view into one, that take() did not make.
CopyOwner* ownerOfCopy(const at::Tensor& copy) {
  c10::DataPtr& data = copy.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const bool is_copy = data.get_deleter() == &giveCopyBack && copy.const_data_ptr() == data.get();
  return is_copy ? static_cast<CopyOwner*>(data.get_context()) : nullptr;
}

// The strides that at::empty_like would choose.
void useLayoutOf(const at::Tensor& tensor, const at::Tensor& copy) {
  if (tensor.is_non_overlapping_and_dense()) {
    copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  } else {
    copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(),
                                                      at::infer_dense_strides(tensor.sizes(), tensor.strides()));
  }
}

}  // namespace

HostCopies::HostCopies(at::Device device, std::int64_t limit)
    : pinned_(!device.is_cpu()), limit_(limit), pool_(std::make_shared<BufferPool>(hostAllocatorFor(device))) {}

at::Tensor HostCopies::take(const at::Tensor& tensor, Stream& writer, Deadline deadline) {
  const std::int64_t bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t live = pool_->live();
  check(limit_ == 0 || live + bytes <= limit_, [&] {
    return concat("offloading needs ", bytes, " bytes of host memory, and ", live, " of the ", limit_,
                  " bytes that config key 'offload_limit' allows are in use; raise it, or offload less at a time");
  });
  Buffer buffer;
  try {
    buffer = pool_->take(bytes);
  } catch (const std::exception& error) {
    fail("offloading needs ", bytes, " bytes of ", pinned_ ? "pinned " : "", "host memory, beside ", live,
         " that are in use for it, and the system has none: ", error.what(),
         "\nOffload less at a time, or free host memory; what may be pinned is bounded by 'ulimit -l' and, in a "
         "container, by its memory limit");
  }
  writer.wait(buffer.free_after, deadline);
  buffer.free_after = Event();
  void* const memory = buffer.memory.get();
  auto* owner = new CopyOwner{pool_, std::move(buffer)};
  at::Tensor copy = tensorOver(c10::DataPtr(memory, owner, &giveCopyBack, at::kCPU), bytes, tensor.sizes(),
                               tensor.scalar_type(), at::kCPU);
  useLayoutOf(tensor, copy);
  return copy;
}

HostCopies::InFlight HostCopies::inFlight(const at::Tensor& copy) {
  const CopyOwner* owner = ownerOfCopy(copy);
  if (owner == nullptr) {
    return {copy, nullptr};
  }
  at::Tensor alias = rawTensor(owner->buffer.memory.get(), copy.sizes(), copy.scalar_type(), at::kCPU);
  useLayoutOf(copy, alias);
  return {std::move(alias), owner->pool};
}

void HostCopies::usedUntil(const at::Tensor& copy, Event event) {
  if (CopyOwner* owner = ownerOfCopy(copy); owner != nullptr) {
    owner->buffer.free_after = std::move(event);
  }
}

}  // namespace dc
