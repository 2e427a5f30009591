#include "deepcompile/comm/shm_tensors.h"

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

using c10d::ReduceOp;

std::optional<shm::ReduceOp> engineOp(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
      return shm::ReduceOp::Sum;
    case ReduceOp::AVG:
      return shm::ReduceOp::Average;
    case ReduceOp::PRODUCT:
      return shm::ReduceOp::Product;
    case ReduceOp::MIN:
      return shm::ReduceOp::Min;
    case ReduceOp::MAX:
      return shm::ReduceOp::Max;
    case ReduceOp::BAND:
      return shm::ReduceOp::And;
    case ReduceOp::BOR:
      return shm::ReduceOp::Or;
    case ReduceOp::BXOR:
      return shm::ReduceOp::Xor;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<shm::DType> engineType(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return shm::DType::Float32;
    case at::kDouble:
      return shm::DType::Float64;
    case at::kHalf:
      return shm::DType::Float16;
    case at::kBFloat16:
      return shm::DType::BFloat16;
    case at::kChar:
      return shm::DType::Int8;
    case at::kShort:
      return shm::DType::Int16;
    case at::kInt:
      return shm::DType::Int32;
    case at::kLong:
      return shm::DType::Int64;
    case at::kByte:
      return shm::DType::UInt8;
    case at::kBool:
      return shm::DType::Bool;
    default:
      return std::nullopt;
  }
}

Reduction reductionOf(at::ScalarType dtype, const ReduceOp& op, std::string_view call) {
  const ReduceOp::RedOpType kind = op;
  const auto reduction = engineOp(kind);
  check(reduction.has_value(), [&] {
    return concat(call, ": the backend 'shm' has no ", kind == ReduceOp::PREMUL_SUM ? "PREMUL_SUM" : "such reduction",
                  kind == ReduceOp::PREMUL_SUM ? "; scale the tensor before the sum" : "");
  });
  const bool complex = at::isComplexType(dtype);
  const auto element = engineType(complex ? c10::toRealValueType(dtype) : dtype);
  // The sum of complex numbers is the sum of their parts; their product is not.
  const bool known = element && shm::supports(*reduction, *element) &&
                     (!complex || *reduction == shm::ReduceOp::Sum || *reduction == shm::ReduceOp::Average);
  check(known, [&] {
    return concat(call, ": the backend 'shm' has no ", shm::name(*reduction), " of ", c10::toString(dtype),
                  " tensors; convert the tensor, or use gloo for this group");
  });
  return {*element, *reduction, complex ? 2 : 1};
}

void checkInput(const at::Tensor& tensor, at::ScalarType dtype, std::string_view call) {
  check(tensor.defined(), [&] { return concat(call, ": an undefined tensor"); });
  check(tensor.layout() == at::kStrided && !tensor.is_nested(), [&] {
    return concat(call, ": the backend 'shm' moves dense tensors only, and this one is ",
                  tensor.is_nested() ? "nested" : "sparse", "; use gloo for it, or call to_dense()");
  });
  check(tensor.is_cpu(), [&] {
    return concat(call, ": the backend 'shm' moves CPU tensors only, and this one is on ", tensor.device());
  });
  check(tensor.scalar_type() == dtype, [&] {
    return concat(call, ": tensors of ", c10::toString(dtype), " and ", c10::toString(tensor.scalar_type()),
                  " in one call");
  });
}

void checkOutput(const at::Tensor& tensor, at::ScalarType dtype, std::string_view call) {
  checkInput(tensor, dtype, call);
  at::assert_no_internal_overlap(tensor);
}

at::Tensor readable(const at::Tensor& tensor) {
  return isPlain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

Writable::Writable(const at::Tensor& target, Contents contents) : target_(target) {
  if (isPlain(target)) {
    plain_ = target;
  } else if (contents == Contents::Keep) {
    plain_ = readable(target);
  } else {
    plain_ = at::empty(target.sizes(), target.options().memory_format(at::MemoryFormat::Contiguous));
  }
}

void Writable::commit() const {
  if (!plain_.is_same(target_)) {
    target_.copy_(plain_);
  }
}

std::uint64_t tagOf(at::ScalarType dtype) {
  // Eight characters are room enough for what tells the types apart, which is the end of names like Float8_e4m3fn.
  std::string_view name = c10::toString(dtype);
  if (const std::size_t bar = name.find('_'); bar != std::string_view::npos) {
    name = name.substr(bar + 1);
  }
  std::uint64_t tag = 0;
  std::memcpy(&tag, name.data(), std::min(name.size(), sizeof(tag)));
  return tag;
}

}  // namespace dc
