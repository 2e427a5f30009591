// The runtime's record of a parameter: this rank's shard, its gradient buffer, and whether the shard is on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/host_copies.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class DSParam {
 public:
  // ZeRO-3 (`partitioned`): `ds_tensor` is this rank's shard of the flattened parameter, padded to the same size on all
  // ranks, and `grad_buffer` is as large. ZeRO-1 and 2: `ds_tensor` is the whole parameter and `grad_buffer` receives
  // elements [offset, offset + numel) of its flattened gradient; an empty one means that this rank owns nothing of it.
  // An undefined `grad_buffer` (or, for ZeRO-3, an empty one beside a non-empty shard) marks a frozen parameter.
  DSParam(std::int64_t id, std::vector<std::int64_t> ds_shape, at::Tensor ds_tensor, at::Tensor grad_buffer,
          bool partitioned, std::int64_t offset, bool persistent);

  std::int64_t getId() const { return id_; }
  const std::vector<std::int64_t>& getShape() const { return shape_; }
  at::ScalarType getDtype() const { return dtype_; }
  // The shard on its device. If it is offloaded, reloads it and waits for that.
  const at::Tensor& getDSTensor() const {
    if (offload_ != nullptr && (offload_->away || !offload_->reloaded.trivial())) [[unlikely]] {
      awaitReload();
    }
    return ds_tensor_;
  }
  const at::Tensor& getGradBuffer() const { return grad_buffer_; }
  // The gradient buffer with one dimension, to be written. Allocates memory if it was freed.
  const at::Tensor& gradMemory() const;
  // Makes the memory of a donated gradient that of the buffer. Returns false and does nothing if the gradient does not
  // fit, if other tensors share its memory, or if the buffer has memory.
  bool adoptGradMemory(const at::Tensor& gradient) const;
  // Frees the buffer's memory until gradMemory() or adoptGradMemory(). A gradient to which the program holds a
  // reference keeps its memory.
  void letGradMemoryGo() const;
  bool hasGradMemory() const { return grad_buffer_.defined() && grad_buffer_.storage().nbytes() > 0; }
  bool isPartitioned() const { return partitioned_; }
  std::int64_t getOffset() const { return offset_; }
  bool isPersistent() const { return persistent_; }
  void setPersistent(bool persistent) { persistent_ = persistent; }

  // Moves the shard to host memory; its device memory is freed when the copy is done. Not while a gather reads it.
  void offload();
  // Starts copying it back into the same storage; getDSTensor() waits for the copy.
  void reload() { bringBack(); }
  // Whether `tensor` is the object that was registered, whatever memory it has now.
  bool isShard(const at::Tensor& tensor) const { return ds_tensor_.is_same(tensor); }
  bool isOffloaded() const { return offload_ != nullptr && offload_->away; }

  std::int64_t numel() const { return numel_; }
  bool trainable() const { return trainable_; }
  // Replaces the gradient buffer; undefined: the parameter is frozen from now on.
  void setGradBuffer(at::Tensor grad_buffer);
  // The dtype of gradients in reductions: that of `grad_buffer`, unless set at registration.
  at::ScalarType getReduceDtype() const { return reduce_dtype_; }
  // The dtype in which gradients add up over backwards.
  at::ScalarType getAccumulationDtype() const { return grad_buffer_.defined() ? grad_buffer_.scalar_type() : dtype_; }
  void setReduceDtype(at::ScalarType dtype) { reduce_dtype_ = dtype; }

  // Notes the tensor that was last published as shard.grad, if it is a cast of the gradient buffer.
  void notePublished(const at::Tensor& gradient);
  // True if `gradient` is that tensor, unchanged. Then the buffer holds the same values in higher precision.
  bool isPublished(const at::Tensor& gradient) const;

  const std::string& getName() const { return name_; }
  void setName(std::string name);
  // "parameter 'w' (id 3, shape [4, 5], Float)", for messages.
  const std::string& describe() const { return *label_; }
  // The error for writes to the gathered parameter.
  const std::shared_ptr<const std::string>& writeError() const { return write_error_; }
  // describe(), for work that may outlive the parameter.
  const std::shared_ptr<const std::string>& label() const { return label_; }

  // What each rank owns of the flattened gradient, padded for ZeRO-3.
  const std::vector<Slice>& getOwners() const { return owners_; }
  void setOwners(std::vector<Slice> owners) { owners_ = std::move(owners); }
  // Elements of the flattened gradient with its padding.
  std::int64_t getPaddedNumel() const { return partitioned_ ? owners_.back().end : numel_; }
  // Set after the ranks have compared. (Under ZeRO-1 and 2 a rank may own nothing of a trainable parameter, so its own
  // empty gradient buffer does not mean that the parameter is frozen.)
  void setTrainable(bool trainable) { trainable_ = trainable; }

  // Sets streams, host memory and timeout (seconds) of offload and reload. Without them both are synchronous.
  void setOffload(std::shared_ptr<Stream> offload, std::shared_ptr<Stream> reload, std::shared_ptr<HostCopies> copies,
                  double timeout);

 private:
  struct Offload {
    std::shared_ptr<Stream> offload_stream;
    std::shared_ptr<Stream> reload_stream;
    std::shared_ptr<HostCopies> copies;
    double timeout = 300;
    bool away = false;
    at::Tensor host;   // the bytes while away
    Event host_ready;  // passes when `host` holds them
    Event reloaded;    // passes when the device holds them again
  };
  Offload& offloadState() const;
  void bringBack() const;
  void awaitReload() const;

  std::int64_t id_;
  std::vector<std::int64_t> shape_;
  std::int64_t numel_;
  at::Tensor ds_tensor_;
  at::ScalarType dtype_;
  at::Tensor grad_buffer_;
  at::Tensor flat_grad_buffer_;
  bool partitioned_;
  std::int64_t offset_;
  bool persistent_;
  bool trainable_ = false;
  at::ScalarType reduce_dtype_ = at::kFloat;
  std::string name_;
  std::shared_ptr<const std::string> label_;
  std::shared_ptr<const std::string> write_error_;
  std::vector<Slice> owners_;
  c10::weak_intrusive_ptr<c10::TensorImpl> published_{c10::intrusive_ptr<c10::TensorImpl>()};
  std::int64_t published_version_ = 0;
  mutable std::shared_ptr<Offload> offload_;  // made at first use
  mutable c10::Storage without_memory_;       // of the gradient buffer when it has none; made at first use
};

}  // namespace dc
