// Tensors as text, for messages and debugging. Part of the installed API.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {

// The first elements at `ptr`, at most `str_len` characters of them.
template <typename T>
std::string tensorPtrToString(T* ptr, std::size_t size, std::size_t str_len = 100) {
  return concat('[', join_as_str(std::vector<T>(ptr, ptr + size), ", ", str_len), ']');
}

// `ptr` points to elements of `datatype` in host memory. An error for a dtype that has no text.
std::string tensorPtrToString(void* ptr, std::size_t size, c10::ScalarType datatype, std::size_t max_elem = 20,
                              std::size_t max_str_len = 100);
// From any device and of any layout.
std::string tensorToString(const at::Tensor& t, std::size_t max_elem = 20, std::size_t max_str_len = 100);
// "[2, 3]"
std::string tensorDimToString(const at::Tensor& t);
std::vector<std::int64_t> sizes_to_int_vector(at::IntArrayRef sizes);

// NCCL's number for a dtype (nccl.h's ncclDataType_t, which the header does not need). An error for a dtype it lacks.
int get_nccl_data_type(at::ScalarType scalar_type);

}  // namespace dc
