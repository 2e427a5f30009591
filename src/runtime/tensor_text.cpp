#include "deepcompile/runtime/tensor_text.h"

#include <algorithm>

#include <ATen/Dispatch.h>

#include "deepcompile/base/error.h"

namespace dc {

std::string tensorPtrToString(void* ptr, std::size_t size, c10::ScalarType datatype, std::size_t max_elem,
                              std::size_t max_str_len) {
  const std::size_t shown = std::min(size, max_elem);
  const auto as = [&]<typename Stored, typename Printed>() {
    const auto* elements = static_cast<const Stored*>(ptr);
    std::vector<Printed> values(elements, elements + shown);
    return tensorPtrToString(values.data(), shown, max_str_len);
  };
  switch (datatype) {
    case at::kFloat:
      return as.operator()<float, float>();
    case at::kDouble:
      return as.operator()<double, double>();
    case at::kHalf:
      return as.operator()<at::Half, float>();
    case at::kBFloat16:
      return as.operator()<at::BFloat16, float>();
    case at::kLong:
      return as.operator()<std::int64_t, std::int64_t>();
    case at::kInt:
      return as.operator()<std::int32_t, std::int32_t>();
    case at::kShort:
      return as.operator()<std::int16_t, std::int16_t>();
    case at::kChar:
      return as.operator()<std::int8_t, int>();
    case at::kByte:
      return as.operator()<std::uint8_t, int>();
    case at::kBool:
      return as.operator()<bool, int>();
    default:
      fail("tensorPtrToString: no text for elements of dtype ", datatype);
  }
}

std::string tensorToString(const at::Tensor& t, std::size_t max_elem, std::size_t max_str_len) {
  const auto shown = std::min<std::int64_t>(t.numel(), static_cast<std::int64_t>(max_elem));
  const at::Tensor host = t.detach().reshape({-1}).narrow(0, 0, shown).to(at::kCPU).contiguous();
  return tensorPtrToString(host.mutable_data_ptr(), static_cast<std::size_t>(shown), host.scalar_type(), max_elem,
                           max_str_len);
}

std::string tensorDimToString(const at::Tensor& t) { return concat('[', join_as_str(t.sizes(), ", "), ']'); }

std::vector<std::int64_t> sizes_to_int_vector(at::IntArrayRef sizes) { return sizes.vec(); }

int get_nccl_data_type(at::ScalarType scalar_type) {
  switch (scalar_type) {
    case at::kChar:
      return 0;
    case at::kByte:
      return 1;
    case at::kBool:
      return 1;
    case at::kInt:
      return 2;
    case at::kLong:
      return 4;
    case at::kHalf:
      return 6;
    case at::kFloat:
      return 7;
    case at::kDouble:
      return 8;
    case at::kBFloat16:
      return 9;
    default:
      fail("NCCL has no type for ", scalar_type);
  }
}

}  // namespace dc
