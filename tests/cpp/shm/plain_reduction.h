// What the reduce kernels must give: the same reduction one element at a time, with formats by arithmetic instead of
// bits; and inputs that have every kind of number in them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {

using Bytes = std::vector<std::byte>;

// ---- The reference ----

struct Format {
  int mantissa;
  int bias;
};
constexpr Format kFloat16{10, 15};
constexpr Format kBFloat16{7, 127};

inline float decode(Format f, std::uint16_t bits) {
  const int fraction = bits & ((1 << f.mantissa) - 1);
  const int exponent = (bits & 0x7FFF) >> f.mantissa;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 2 * f.bias + 1) {
    return sign * (fraction == 0 ? std::numeric_limits<float>::infinity() : std::nanf(""));
  }
  const int hidden = exponent == 0 ? 0 : 1 << f.mantissa;
  return sign * std::ldexp(static_cast<float>(hidden + fraction), std::max(exponent, 1) - f.bias - f.mantissa);
}

inline std::uint16_t encode(Format f, float value) {
  const int infinity = (2 * f.bias + 1) << f.mantissa;
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(infinity | 1 << (f.mantissa - 1));
  }
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value) || value == 0) {
    return static_cast<std::uint16_t>(sign | (value == 0 ? 0 : infinity));
  }
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, 1 - f.bias);
  // In units of the last place; 2^(mantissa+1) of them are the next power of two, and the bits count on from there.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(double{value}), f.mantissa - exponent)));
  const int bits = ((exponent + f.bias - 1) << f.mantissa) + units;
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

template <typename T>
T combined(ReduceOp op, T total, T next) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::Min:
        return std::isnan(total) || total <= next ? total : next;
      case ReduceOp::Max:
        return std::isnan(total) || total >= next ? total : next;
      case ReduceOp::Product:
        return total * next;
      default:
        return total + next;
    }
  } else {
    const auto a = static_cast<std::uint64_t>(total);
    const auto b = static_cast<std::uint64_t>(next);
    switch (op) {
      case ReduceOp::Min:
        return std::min(total, next);
      case ReduceOp::Max:
        return std::max(total, next);
      case ReduceOp::Product:
        return static_cast<T>(a * b);
      case ReduceOp::And:
        return static_cast<T>(a & b);
      case ReduceOp::Or:
        return static_cast<T>(a | b);
      case ReduceOp::Xor:
        return static_cast<T>(a ^ b);
      default:
        return static_cast<T>(a + b);
    }
  }
}

// Element = what lies in memory, decoded to what is accumulated and encoded again.
template <typename Element, typename Decode, typename Encode>
Bytes plainLoop(ReduceOp op, const std::vector<Bytes>& inputs, Decode decoded, Encode encoded) {
  Bytes result(inputs[0].size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(Element)) {
    Element element;
    std::memcpy(&element, &inputs[0][at], sizeof(Element));
    auto total = decoded(element);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      std::memcpy(&element, &inputs[r][at], sizeof(Element));
      total = combined(op, total, decoded(element));
    }
    if constexpr (std::is_floating_point_v<decltype(total)>) {
      if (op == ReduceOp::Average) {
        total /= static_cast<decltype(total)>(inputs.size());
      }
      total = std::isnan(total) ? std::numeric_limits<decltype(total)>::quiet_NaN() : total;
    }
    element = encoded(total);
    std::memcpy(&result[at], &element, sizeof(Element));
  }
  return result;
}

template <typename T>
Bytes plainLoop(ReduceOp op, const std::vector<Bytes>& inputs) {
  return plainLoop<T>(op, inputs, std::identity(), std::identity());
}

inline Bytes plainHalfLoop(ReduceOp op, const std::vector<Bytes>& inputs, Format format) {
  return plainLoop<std::uint16_t>(
      op, inputs, [&](std::uint16_t bits) { return decode(format, bits); },
      [&](float value) { return encode(format, value); });
}

inline Bytes plainBoolLoop(ReduceOp op, const std::vector<Bytes>& inputs) {
  const bool all = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::And;
  const ReduceOp bits = all ? ReduceOp::And : op == ReduceOp::Xor ? ReduceOp::Xor : ReduceOp::Or;
  const auto truth = [](std::uint8_t byte) { return static_cast<std::uint8_t>(byte != 0 ? 1 : 0); };
  return plainLoop<std::uint8_t>(bits, inputs, truth, std::identity());
}

inline Bytes expected(ReduceOp op, DType dtype, const std::vector<Bytes>& inputs) {
  switch (dtype) {
    case DType::Float32:
      return plainLoop<float>(op, inputs);
    case DType::Float64:
      return plainLoop<double>(op, inputs);
    case DType::Float16:
      return plainHalfLoop(op, inputs, kFloat16);
    case DType::BFloat16:
      return plainHalfLoop(op, inputs, kBFloat16);
    case DType::Int8:
      return plainLoop<std::int8_t>(op, inputs);
    case DType::Int16:
      return plainLoop<std::int16_t>(op, inputs);
    case DType::Int32:
      return plainLoop<std::int32_t>(op, inputs);
    case DType::Int64:
      return plainLoop<std::int64_t>(op, inputs);
    case DType::UInt8:
      return plainLoop<std::uint8_t>(op, inputs);
    case DType::Bool:
      return plainBoolLoop(op, inputs);
  }
  return {};
}

// ---- Inputs ----

template <typename T>
T special(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const std::array values = {T{0},
                             -T{0},
                             T{1},
                             T{-1},
                             Limits::min(),
                             Limits::denorm_min(),
                             Limits::max(),
                             -Limits::max(),
                             Limits::infinity(),
                             T{3} / T{2},
                             Limits::quiet_NaN(),
                             -Limits::infinity()};
  return values[random() % values.size()];
}

template <typename T>
void putFloating(std::byte* at, std::mt19937_64& random) {
  const T near = std::uniform_real_distribution<T>(-2, 2)(random);
  const T value = random() % 4 == 0 ? special<T>(random) : near;
  std::memcpy(at, &value, sizeof(T));
}

inline void putHalf(std::byte* at, Format format, std::mt19937_64& random) {
  // Exponents around 1 by random fractions: sums lie between two numbers of the format, often in the middle.
  const auto near = static_cast<int>(random() % 4) + format.bias - 2;
  auto bits = static_cast<std::uint16_t>((near << format.mantissa) | (random() & ((1U << format.mantissa) - 1)) |
                                         (random() & 0x8000));
  if (random() % 4 == 0) {
    bits = encode(format, special<float>(random));
  }
  std::memcpy(at, &bits, sizeof(bits));
}

// A third of the elements are random bits, which are NaNs with payloads, infinities and denormals too.
inline Bytes randomElements(DType dtype, std::int64_t count, std::mt19937_64& random) {
  Bytes bytes(static_cast<std::size_t>(count * sizeOf(dtype)));
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
  for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(sizeOf(dtype))) {
    if (random() % 3 == 0) {
      continue;
    }
    switch (dtype) {
      case DType::Float32:
        putFloating<float>(&bytes[at], random);
        break;
      case DType::Float64:
        putFloating<double>(&bytes[at], random);
        break;
      case DType::Float16:
        putHalf(&bytes[at], kFloat16, random);
        break;
      case DType::BFloat16:
        putHalf(&bytes[at], kBFloat16, random);
        break;
      case DType::Bool:
        bytes[at] = static_cast<std::byte>(random() % 2);
        break;
      default:
        break;
    }
  }
  return bytes;
}

inline std::vector<Bytes> randomInputs(DType dtype, std::size_t inputs, std::int64_t count) {
  std::mt19937_64 random(static_cast<std::uint64_t>(dtype) * 100 + inputs);
  std::vector<Bytes> result(inputs);
  std::generate(result.begin(), result.end(), [&] { return randomElements(dtype, count, random); });
  return result;
}

}  // namespace dc::shm
