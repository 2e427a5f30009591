// PyTorch's tensors as the shared-memory engine takes them: contiguous bytes in logical order. Ranks may lay the same
// tensor out differently, so what is not contiguous is copied, and results are copied back into the caller's own
// tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "deepcompile/shm/dtype.h"
#include "deepcompile/shm/runs.h"

namespace dc {

// The engine's element type; none for those that it cannot reduce.
std::optional<shm::DType> engineType(at::ScalarType dtype);

// How a reduction is done by the engine.
struct Reduction {
  shm::DType dtype;
  shm::ReduceOp op;
  std::int64_t factor;  // numbers of the engine for one element: 2 for complex ones
};
// Throws, naming `call`, the dtype and the reduction, where there is none.
Reduction reductionOf(at::ScalarType dtype, const c10d::ReduceOp& op, std::string_view call);

// Throws, naming `call`, where a tensor is not a dense CPU tensor, or not of `dtype`.
void checkInput(const at::Tensor& tensor, at::ScalarType dtype, std::string_view call);
// Also where several elements share memory, and so cannot be written.
void checkOutput(const at::Tensor& tensor, at::ScalarType dtype, std::string_view call);

// Contiguous, without lazy conjugation or negation.
inline bool isPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// A plain tensor with the same values: the tensor itself where it is that already.
at::Tensor readable(const at::Tensor& tensor);

// Contiguous memory for a result, which `commit` puts into the tensor where the two are not the same.
class Writable {
 public:
  enum class Contents { Keep, Ignore };
  Writable(const at::Tensor& target, Contents contents);
  const at::Tensor& plain() const { return plain_; }
  std::byte* data() const { return static_cast<std::byte*>(plain_.mutable_data_ptr()); }
  void commit() const;

 private:
  at::Tensor target_;
  at::Tensor plain_;
};

inline std::int64_t bytesOf(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }
inline shm::Run runOf(const at::Tensor& plain) { return shm::run(plain.const_data_ptr(), bytesOf(plain)); }

// Its name, or enough of it to tell it from all others: ranks that move elements of different types get an error, too.
std::uint64_t tagOf(at::ScalarType dtype);

}  // namespace dc
