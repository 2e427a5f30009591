// Element types and reductions of the shared-memory collectives, without PyTorch.
#pragma once

#include <cstdint>
#include <string_view>

namespace dc::shm {

enum class DType : std::uint8_t { Float32, Float64, Float16, BFloat16, Int8, Int16, Int32, Int64, UInt8, Bool };

enum class ReduceOp : std::uint8_t { Sum, Average, Min, Max, Product, And, Or, Xor };

// Bytes of one element. Here and below a value outside the enumeration gives 0, "?" or false: it may have come from
// another process.
constexpr std::int64_t sizeOf(DType dtype) {
  switch (dtype) {
    case DType::Int8:
    case DType::UInt8:
    case DType::Bool:
      return 1;
    case DType::Float16:
    case DType::BFloat16:
    case DType::Int16:
      return 2;
    case DType::Float32:
    case DType::Int32:
      return 4;
    case DType::Float64:
    case DType::Int64:
      return 8;
  }
  return 0;
}

constexpr std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return "float32";
    case DType::Float64:
      return "float64";
    case DType::Float16:
      return "float16";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Int8:
      return "int8";
    case DType::Int16:
      return "int16";
    case DType::Int32:
      return "int32";
    case DType::Int64:
      return "int64";
    case DType::UInt8:
      return "uint8";
    case DType::Bool:
      return "bool";
  }
  return "?";
}

constexpr std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Average:
      return "average";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
    case ReduceOp::And:
      return "and";
    case ReduceOp::Or:
      return "or";
    case ReduceOp::Xor:
      return "xor";
  }
  return "?";
}

// Whether the reduction has a meaning for elements of this type: bits of floating-point numbers are not combined, and
// an average of integers would have to round.
constexpr bool supports(ReduceOp op, DType dtype) {
  const bool floating =
      dtype == DType::Float32 || dtype == DType::Float64 || dtype == DType::Float16 || dtype == DType::BFloat16;
  if (sizeOf(dtype) == 0) {
    return false;
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Min:
    case ReduceOp::Max:
    case ReduceOp::Product:
      return true;
    case ReduceOp::Average:
      return floating;
    case ReduceOp::And:
    case ReduceOp::Or:
    case ReduceOp::Xor:
      return !floating;
  }
  return false;
}

}  // namespace dc::shm
