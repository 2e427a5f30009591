// Flat buckets of gradients, each of which is reduced by one collective.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class GradientReducer;

// One gradient in a bucket. Holds the gradient until the copy into `send_buf`, a slice of the bucket, is done, or,
// where `send_buf` is the gradient's own memory, until it is reduced. An undefined gradient stands for a parameter that
// has none: its slice holds zeros.
class ReduceTask {
 public:
  ReduceTask(std::int64_t ds_id, at::Tensor grad, at::Tensor send_buf)
      : ds_id_(ds_id),
        has_gradient_(grad.defined()),
        version_(versionOf(grad)),
        grad_(std::move(grad)),
        send_buf_(std::move(send_buf)) {}

  std::int64_t getDSId() const { return ds_id_; }
  const at::Tensor& getSendBuf() const { return send_buf_; }
  bool hasGradient() const { return has_gradient_; }
  // True if the gradient was written to since it was handed over.
  bool changed() const { return versionOf(grad_) != version_ && grad_.defined(); }
  // Drops the reference to the gradient. Called when the copy is done.
  void dropGradient() { grad_ = at::Tensor(); }

 private:
  static std::int64_t versionOf(const at::Tensor& grad) {
    return grad.defined() && !grad.is_inference() ? grad._version() : 0;
  }

  std::int64_t ds_id_;
  bool has_gradient_;
  std::int64_t version_;
  at::Tensor grad_;
  at::Tensor send_buf_;
};

// A flat buffer that is filled from the front, made at its first use. Sizes count elements.
class ReduceBucket {
 public:
  // The memory comes from `comm`, which will reduce the bucket; without one it is ordinary memory.
  ReduceBucket(std::int64_t size, at::ScalarType scalar_type, at::Device device = at::kCPU,
               std::shared_ptr<Communicator> comm = nullptr);

  std::int64_t getSize() const { return size_; }
  std::int64_t getOffset() const { return offset_; }
  const at::Tensor& getBuffer() const;
  // Bytes of its buffer; 0 before its first use.
  std::int64_t bytes() const { return buffer_.defined() ? static_cast<std::int64_t>(buffer_.nbytes()) : 0; }
  bool empty() const { return offset_ + adopted_ == 0; }
  at::ScalarType getScalarType() const { return options_.dtype().toScalarType(); }

  // Grows the bucket to at least `size` elements. Only while it is empty, because slices in use would not move along.
  void reserve(std::int64_t size);
  // The next `numel` elements.
  at::Tensor allocate(std::int64_t numel);
  // Counts `numel` elements that are reduced with the bucket from their own memory.
  void adopt(std::int64_t numel) { adopted_ += numel; }
  // True when `numel` more elements do not fit behind what the bucket counts.
  bool shouldFlush(std::int64_t numel) const {
    const std::int64_t counted = offset_ + adopted_;
    return counted > 0 && counted + numel > size_;
  }
  void reset() { offset_ = adopted_ = 0; }

 private:
  std::int64_t size_;
  std::int64_t offset_ = 0;
  std::int64_t adopted_ = 0;
  at::TensorOptions options_;
  std::shared_ptr<Communicator> comm_;
  mutable at::Tensor buffer_;
};

// A bucket per dtype that is being filled and, with double buffering, a second one whose reduction is in flight.
class DoubleBufferedReduceBucket {
 public:
  DoubleBufferedReduceBucket(std::int64_t initial_bucket_size, bool enable_double_buffer, at::Device device = at::kCPU,
                             std::shared_ptr<Communicator> comm = nullptr);

  // Called after the reduction of the current bucket was given to `rs_stream`. Copies into the next bucket through
  // `copy_stream` wait until that bucket's last reduction has passed.
  void swap(at::ScalarType scalar_type, Stream& rs_stream, Stream& copy_stream, Deadline deadline);
  // The same without the wait. The caller then waits for getEvent() before its first use of the next bucket.
  void swap(at::ScalarType scalar_type, Stream& rs_stream);
  // The bucket that is being filled; made at first use.
  std::shared_ptr<ReduceBucket> getBuffer(at::ScalarType scalar_type);
  // Passes when the last reduction of the bucket that is being filled has read it.
  Event getEvent(at::ScalarType scalar_type);
  // The reducer whose tasks fill the current bucket; null when it is empty. Another one flushes it before it adds its
  // own.
  GradientReducer*& user(at::ScalarType scalar_type) { return pair(scalar_type).user; }
  // `reducer` is going: forget that it used a bucket.
  void forget(const GradientReducer* reducer);
  // Bytes of all buckets, full or empty.
  std::int64_t bytes() const;
  // Frees all buckets. The caller has waited for what was in flight.
  void clear() { slots_.clear(); }

 private:
  struct Slot {
    std::shared_ptr<ReduceBucket> bucket;
    Event free;  // passes when the bucket's last reduction has read it
  };
  struct Pair {
    Slot current;
    Slot shadow;
    GradientReducer* user = nullptr;
  };
  Pair& pair(at::ScalarType scalar_type);

  const std::int64_t initial_size_;
  const bool double_buffer_;
  const at::Device device_;
  const std::shared_ptr<Communicator> comm_;
  std::map<at::ScalarType, Pair> slots_;
};

}  // namespace dc
