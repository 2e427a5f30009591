#include "deepcompile/runtime/reduce_bucket.h"

#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"

namespace dc {

ReduceBucket::ReduceBucket(std::int64_t size, at::ScalarType scalar_type, at::Device device,
                           std::shared_ptr<Communicator> comm)
    : size_(size), options_(at::TensorOptions().dtype(scalar_type).device(device)), comm_(std::move(comm)) {
  check(size > 0, [&] { return concat("a reduce bucket of ", size, " elements cannot hold a gradient"); });
}

const at::Tensor& ReduceBucket::getBuffer() const {
  if (!buffer_.defined()) {
    buffer_ = comm_ == nullptr ? at::empty({size_}, options_) : comm_->empty({size_}, options_);
  }
  return buffer_;
}

void ReduceBucket::reserve(std::int64_t size) {
  if (size <= size_) {
    return;
  }
  check(offset_ == 0, [&] {
    return concat("a reduce bucket that holds ", offset_, " elements cannot grow from ", size_, " to ", size);
  });
  buffer_ = at::Tensor();
  size_ = size;
}

at::Tensor ReduceBucket::allocate(std::int64_t numel) {
  check(numel >= 0 && offset_ + numel <= size_, [&] {
    return concat("a reduce bucket of ", size_, " elements, ", offset_, " of them used, has no room for ", numel);
  });
  at::Tensor slice = getBuffer().narrow(0, offset_, numel);
  offset_ += numel;
  return slice;
}

DoubleBufferedReduceBucket::DoubleBufferedReduceBucket(std::int64_t initial_bucket_size, bool enable_double_buffer,
                                                       at::Device device, std::shared_ptr<Communicator> comm)
    : initial_size_(initial_bucket_size),
      double_buffer_(enable_double_buffer),
      device_(device),
      comm_(std::move(comm)) {
  check(initial_bucket_size > 0, [&] {
    return concat("initial_reduce_bucket_size is ", initial_bucket_size, " elements; it must be at least 1");
  });
}

void DoubleBufferedReduceBucket::swap(at::ScalarType scalar_type, Stream& rs_stream, Stream& copy_stream,
                                      Deadline deadline) {
  swap(scalar_type, rs_stream);
  copy_stream.wait(pair(scalar_type).current.free, deadline);
}

void DoubleBufferedReduceBucket::swap(at::ScalarType scalar_type, Stream& rs_stream) {
  Pair& buckets = pair(scalar_type);
  buckets.current.free = rs_stream.record();
  if (double_buffer_) {
    std::swap(buckets.current, buckets.shadow);
    if (buckets.current.bucket == nullptr) {
      buckets.current.bucket =
          std::make_shared<ReduceBucket>(buckets.shadow.bucket->getSize(), scalar_type, device_, comm_);
    }
  }
  buckets.user = nullptr;
  buckets.current.bucket->reset();
}

std::shared_ptr<ReduceBucket> DoubleBufferedReduceBucket::getBuffer(at::ScalarType scalar_type) {
  return pair(scalar_type).current.bucket;
}

Event DoubleBufferedReduceBucket::getEvent(at::ScalarType scalar_type) { return pair(scalar_type).current.free; }

void DoubleBufferedReduceBucket::forget(const GradientReducer* reducer) {
  for (auto& [scalar_type, buckets] : slots_) {
    if (buckets.user == reducer) {
      buckets.user = nullptr;
      buckets.current.bucket->reset();
    }
  }
}

std::int64_t DoubleBufferedReduceBucket::bytes() const {
  std::int64_t total = 0;
  for (const auto& [scalar_type, buckets] : slots_) {
    for (const Slot* slot : {&buckets.current, &buckets.shadow}) {
      total += slot->bucket == nullptr ? 0 : slot->bucket->bytes();
    }
  }
  return total;
}

DoubleBufferedReduceBucket::Pair& DoubleBufferedReduceBucket::pair(at::ScalarType scalar_type) {
  Pair& buckets = slots_[scalar_type];
  if (buckets.current.bucket == nullptr) {
    buckets.current.bucket = std::make_shared<ReduceBucket>(initial_size_, scalar_type, device_, comm_);
  }
  return buckets;
}

}  // namespace dc
