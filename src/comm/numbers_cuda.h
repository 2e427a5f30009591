// The types of numbers that our CUDA kernels calculate with.
#pragma once

#include <optional>

#include <c10/core/ScalarType.h>

#include "deepcompile/comm/copy_kernels_cuda.h"

namespace dc::cuda {

// Nothing for types that the kernels do not know.
inline std::optional<Number> numberOf(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return Number::Float;
    case c10::ScalarType::Half:
      return Number::Half;
    case c10::ScalarType::BFloat16:
      return Number::BFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace dc::cuda
