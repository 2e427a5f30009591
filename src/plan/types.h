// The vocabulary of the planner. Times are whole nanoseconds and sizes whole bytes, so that a plan
// is the same on every machine: no decision depends on floating point.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace dc::plan {

using Nanos = std::int64_t;
using Bytes = std::int64_t;
using Index = std::int32_t;
__extension__ typedef __int128 Wide;  // products of two 64-bit values

inline constexpr Index kNone = -1;

// No time or size in a graph or machine may exceed this, and the sums over a graph not 2^60:
// nothing can overflow.
inline constexpr std::int64_t kLargest = std::int64_t{1} << 46;

// What a step is made of. A step graph holds Compute and Optimizer nodes; the planner places the
// others around them.
enum class NodeKind : std::uint8_t {
  Compute,
  Gather,
  Wait,
  Release,
  Reduce,
  Offload,
  Reload,
  Optimizer,
};

// What runs at the same time as what: each resource runs its work in order, one at a time.
enum class Resource : std::uint8_t { Compute, Gather, Reduce, HostToDevice, DeviceToHost };
inline constexpr int kResources = 5;

enum class Phase : std::uint8_t { Forward, Backward, Update };

enum class Dtype : std::uint8_t { F32, F16, BF16, F8 };

std::string_view name(NodeKind kind);
std::string_view name(Resource resource);
std::string_view name(Phase phase);
std::string_view name(Dtype dtype);

std::optional<NodeKind> nodeKind(std::string_view name);
std::optional<Phase> phase(std::string_view name);
std::optional<Dtype> dtype(std::string_view name);
Bytes elementBytes(Dtype dtype);

// a * b / c without overflow; the product is exact and the quotient is rounded down (up).
inline std::int64_t mulDiv(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;  // most fit, and are many times as fast to divide
  return __builtin_mul_overflow(a, b, &product) ? static_cast<std::int64_t>(static_cast<Wide>(a) * b / c) : product / c;
}
inline std::int64_t mulDivUp(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(product, c - 1, &product)
             ? static_cast<std::int64_t>((static_cast<Wide>(a) * b + c - 1) / c)
             : product / c;
}

}  // namespace dc::plan
