#include "deepcompile/runtime/param.h"

#include <utility>

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {

DSParam::DSParam(std::int64_t id, std::vector<std::int64_t> ds_shape, at::Tensor ds_tensor, at::Tensor grad_buffer,
                 bool partitioned, std::int64_t offset, bool persistent)
    : id_(id),
      shape_(std::move(ds_shape)),
      numel_(static_cast<std::int64_t>(productDim(shape_))),
      ds_tensor_(std::move(ds_tensor)),
      dtype_(ds_tensor_.scalar_type()),
      partitioned_(partitioned),
      offset_(offset),
      persistent_(persistent) {
  setGradBuffer(std::move(grad_buffer));
  setName("");
}

void DSParam::setGradBuffer(at::Tensor grad_buffer) {
  grad_buffer_ = std::move(grad_buffer);
  without_memory_ = c10::Storage();
  flat_grad_buffer_ = grad_buffer_.defined() ? grad_buffer_.view({-1}) : at::Tensor();
  trainable_ = grad_buffer_.defined() && (grad_buffer_.numel() > 0 || numel_ == 0 || !partitioned_);
  reduce_dtype_ = grad_buffer_.defined() ? grad_buffer_.scalar_type() : dtype_;
}

const at::Tensor& DSParam::gradMemory() const {
  if (grad_buffer_.defined() && grad_buffer_.numel() > 0 && !hasGradMemory()) {
    const at::Tensor fresh = at::empty_like(flat_grad_buffer_);
    grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
    flat_grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  }
  return flat_grad_buffer_;
}

bool DSParam::adoptGradMemory(const at::Tensor& gradient) const {
  const bool fits = gradient.scalar_type() == grad_buffer_.scalar_type() && gradient.is_contiguous() &&
                    !gradient.is_conj() && !gradient.is_neg() && gradient.storage_offset() == 0 &&
                    gradient.storage().nbytes() == gradient.nbytes() && gradient.storage().use_count() == 1 &&
                    gradient.numel() == grad_buffer_.numel();
  if (!fits || hasGradMemory() || grad_buffer_.storage_offset() != 0) {
    return false;
  }
  grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(gradient.storage());
  flat_grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(gradient.storage());
  return true;
}

void DSParam::letGradMemoryGo() const {
  if (!hasGradMemory() || grad_buffer_.storage_offset() != 0) {
    return;
  }
  if (!without_memory_ || without_memory_.nbytes() > 0) {  // the program, which sees this storage, may have resized it
    const at::Device device = grad_buffer_.device();
    without_memory_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
        /*resizable=*/true));
  }
  grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(without_memory_);
  flat_grad_buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(without_memory_);
}

void DSParam::setName(std::string name) {
  name_ = std::move(name);
  const std::string quoted = name_.empty() ? "" : " '" + name_ + "'";
  label_ = std::make_shared<const std::string>(
      concat("parameter", quoted, " (id ", id_, ", shape [", join_as_str(shape_, ", "), "], ", dtype_, ")"));
  write_error_ = std::make_shared<const std::string>(concat(
      *label_,
      " is sharded: what a module shows of it is a gathered copy, and changing that in place would be lost. Use 'with "
      "deepcompile.full_params(module):' to read or change whole parameters"));
}

void DSParam::notePublished(const at::Tensor& gradient) {
  published_ = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr());
  published_version_ = gradient._version();
}

bool DSParam::isPublished(const at::Tensor& gradient) const {
  return published_._unsafe_get_target() == gradient.unsafeGetTensorImpl() && !published_.expired() &&
         published_version_ == gradient._version();
}

void DSParam::setOffload(std::shared_ptr<Stream> offload, std::shared_ptr<Stream> reload,
                         std::shared_ptr<HostCopies> copies, double timeout) {
  Offload& state = offloadState();
  state.offload_stream = std::move(offload);
  state.reload_stream = std::move(reload);
  state.copies = std::move(copies);
  state.timeout = timeout;
}

DSParam::Offload& DSParam::offloadState() const {
  if (offload_ == nullptr) {
    offload_ = std::make_shared<Offload>();
    offload_->offload_stream = makeCpuStream(CpuStreamMode::Inline, "offload");
    offload_->reload_stream = makeCpuStream(CpuStreamMode::Inline, "reload");
    offload_->copies = std::make_shared<HostCopies>(ds_tensor_.device(), 0);
  }
  return *offload_;
}

void DSParam::awaitReload() const {
  bringBack();
  if (!offload_->reloaded.trivial()) {
    offload_->reloaded.wait(deadlineAfter(Seconds(offload_->timeout)));
    offload_->reloaded = Event();
  }
}

void DSParam::offload() {
  Offload& state = offloadState();
  if (state.away) {
    return;
  }
  const at::Tensor& shard = getDSTensor();
  c10::StorageImpl& storage = *shard.storage().unsafeGetStorageImpl();
  check(static_cast<std::size_t>(shard.nbytes()) == storage.nbytes(), [&] {
    return concat(describe(), " cannot be offloaded: its shard of ", shard.nbytes(),
                  " bytes is a view into a storage of ", storage.nbytes(),
                  " bytes; register a shard that owns its storage");
  });
  if (storage.nbytes() == 0) {
    return;
  }
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  const at::Tensor there = rawTensor(storage._mutable_data_ptr_no_checks().get(), {bytes}, at::kByte, shard.device());
  state.host = state.copies->take(there, *state.offload_stream, deadlineAfter(Seconds(state.timeout)));
  // The shard's storage is empty from now on; the stream's work owns the device memory until it has been copied.
  auto memory = std::make_shared<c10::DataPtr>(storage.set_data_ptr(c10::DataPtr(nullptr, shard.device())));
  guardUntilReturn(storage, describe() + " is offloaded to host memory; call reload_parameter before it is used");
  state.offload_stream->run(
      [to = HostCopies::inFlight(state.host), there, memory] { to.tensor.copy_(there, /*non_blocking=*/true); });
  state.host_ready = state.offload_stream->record();
  HostCopies::usedUntil(state.host, state.host_ready);
  state.away = true;
}

void DSParam::bringBack() const {
  if (!isOffloaded()) {
    return;
  }
  Offload& state = *offload_;
  c10::StorageImpl& storage = *ds_tensor_.storage().unsafeGetStorageImpl();
  const std::int64_t bytes = state.host.numel();
  const at::Device device = ds_tensor_.device();
  c10::Allocator* const allocator =
      storage.allocator() != nullptr ? storage.allocator() : c10::GetAllocator(device.type());
  c10::DataPtr memory = allocator->allocate(static_cast<std::size_t>(bytes));
  const at::Tensor target = rawTensor(memory.get(), {bytes}, at::kByte, device);
  unguardStorage(storage);
  storage.set_data_ptr_noswap(std::move(memory));
  state.reload_stream->wait(state.host_ready, deadlineAfter(Seconds(state.timeout)));
  state.reload_stream->run([from = HostCopies::inFlight(state.host), target, shard = ds_tensor_] {
    target.copy_(from.tensor, /*non_blocking=*/true);
  });
  state.reloaded = state.reload_stream->record();
  HostCopies::usedUntil(state.host, state.reloaded);
  state.host = at::Tensor();
  state.host_ready = Event();
  state.away = false;
}

}  // namespace dc
