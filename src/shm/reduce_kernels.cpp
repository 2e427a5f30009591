#include "deepcompile/shm/reduce_kernels.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/native_bfloat16.h"

// Structs here hold vectors, which those of SVE and RVV cannot be members of. No processor that matters ends at SSSE3.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "deepcompile/shm/reduce_kernels.cpp"  // this file again, once per target
#include <hwy/foreach_target.h>
// Keep this order.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "deepcompile/shm/reduce_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace dc::shm::HWY_NAMESPACE {

using Inputs = std::span<const std::byte* const>;
using Outputs = std::span<std::byte* const>;

constexpr std::size_t kLine = 64;  // bytes; at least a vector of every target

HWY_INLINE std::size_t bytesToLine(const std::byte* p) { return -reinterpret_cast<std::uintptr_t>(p) % kLine; }

// The bytes [at, at + size) of all buffers, less than a vector of them: by way of a full one, so that the same
// instructions make the same bits.
template <typename Lanes, typename Op>
void reducePart(const Op& op, Inputs inputs, Outputs outputs, std::size_t at, std::size_t size) {
  std::byte padded[Lanes::kBytes] = {};
  std::memcpy(padded, inputs[0] + at, size);
  auto total = Lanes::load(padded);
  for (const std::byte* input : inputs.subspan(1)) {
    std::memcpy(padded, input + at, size);
    total = Lanes::combine(op, total, Lanes::load(padded));
  }
  Lanes::Memory::store(Lanes::finish(op, total), padded);
  for (std::byte* output : outputs) {
    std::memcpy(output + at, padded, size);
  }
}

// The bytes [at, end) of all buffers. Totals stay in registers over all inputs; four of them hide the latencies.
template <typename Lanes, typename Op>
void reduceRange(const Op& op, Inputs inputs, Outputs outputs, std::size_t at, std::size_t end,
                 const CacheHints& hints) {
  using Memory = typename Lanes::Memory;
  constexpr std::size_t kStep = Lanes::kBytes;
  const bool streaming = hints.streaming;
  const std::byte* const read_next = hints.read_next;
  for (; end - at >= 4 * kStep; at += 4 * kStep) {
    if (read_next != nullptr) {
      for (std::size_t line = 0; line < 4 * kStep; line += kLine) {
        __builtin_prefetch(read_next + at + line, 0, 2);  // to the second cache: the first is full of what is reduced
      }
    }
    const std::byte* first = inputs[0] + at;
    auto a = Lanes::load(first);
    auto b = Lanes::load(first + kStep);
    auto c = Lanes::load(first + 2 * kStep);
    auto d = Lanes::load(first + 3 * kStep);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const std::byte* next = inputs[r] + at;
      a = Lanes::combine(op, a, Lanes::load(next));
      b = Lanes::combine(op, b, Lanes::load(next + kStep));
      c = Lanes::combine(op, c, Lanes::load(next + 2 * kStep));
      d = Lanes::combine(op, d, Lanes::load(next + 3 * kStep));
    }
    const auto [x, y, z, w] = finishFour<Lanes>(op, Four{a, b, c, d});
    for (std::byte* output : outputs) {
      std::byte* to = output + at;
      if (streaming) {
        Memory::stream(x, to);
        Memory::stream(y, to + kStep);
        Memory::stream(z, to + 2 * kStep);
        Memory::stream(w, to + 3 * kStep);
      } else {
        Memory::store(x, to);
        Memory::store(y, to + kStep);
        Memory::store(z, to + 2 * kStep);
        Memory::store(w, to + 3 * kStep);
      }
    }
  }
  for (; at < end; at += kStep) {
    reducePart<Lanes>(op, inputs, outputs, at, std::min(kStep, end - at));
  }
}

template <typename Lanes, typename Op>
void reduceAll(const Op& op, Inputs inputs, Outputs outputs, std::int64_t count, CacheHints hints) {
  const std::size_t bytes = static_cast<std::size_t>(count) * Lanes::kElement;
  // Streaming needs aligned outputs. Other stores are much faster if they do not cross lines, which pays soon.
  std::size_t head = hints.streaming || bytes >= 4096 ? std::min(bytesToLine(outputs[0]), bytes) : 0;
  head = head % Lanes::kElement == 0 ? head : 0;
  for (const std::byte* output : outputs) {
    hints.streaming = hints.streaming && bytesToLine(output + head) == 0;
  }
  reduceRange<Lanes>(op, inputs, outputs, 0, head, {});
  reduceRange<Lanes>(op, inputs, outputs, head, bytes, hints);
}

template <typename Lanes>
void reduceFloating(ReduceOp op, Inputs inputs, Outputs outputs, std::int64_t count, const CacheHints& hints) {
  switch (op) {
    case ReduceOp::Average:
      if (std::has_single_bit(inputs.size())) {
        return reduceAll<Lanes>(AverageOfPowerOfTwo(inputs.size()), inputs, outputs, count, hints);
      }
      return reduceAll<Lanes>(Average(inputs.size()), inputs, outputs, count, hints);
    case ReduceOp::Min:
      return reduceAll<Lanes>(Min(), inputs, outputs, count, hints);
    case ReduceOp::Max:
      return reduceAll<Lanes>(Max(), inputs, outputs, count, hints);
    case ReduceOp::Product:
      return reduceAll<Lanes>(Product(), inputs, outputs, count, hints);
    default:
      return reduceAll<Lanes>(Sum(), inputs, outputs, count, hints);
  }
}

// Bitwise operations take any integer as bytes.
template <typename Lanes>
void reduceBits(ReduceOp op, Inputs inputs, Outputs outputs, std::int64_t bytes, const CacheHints& hints) {
  switch (op) {
    case ReduceOp::And:
      return reduceAll<Lanes>(And(), inputs, outputs, bytes, hints);
    case ReduceOp::Xor:
      return reduceAll<Lanes>(Xor(), inputs, outputs, bytes, hints);
    default:
      return reduceAll<Lanes>(Or(), inputs, outputs, bytes, hints);
  }
}

template <typename Signed, typename Unsigned>
void reduceInteger(ReduceOp op, Inputs inputs, Outputs outputs, std::int64_t count, const CacheHints& hints) {
  switch (op) {
    case ReduceOp::Sum:
      return reduceAll<PlainLanes<Unsigned>>(Sum(), inputs, outputs, count, hints);
    case ReduceOp::Product:
      return reduceAll<PlainLanes<Unsigned>>(Product(), inputs, outputs, count, hints);
    case ReduceOp::Min:
      return reduceAll<PlainLanes<Signed>>(Min(), inputs, outputs, count, hints);
    case ReduceOp::Max:
      return reduceAll<PlainLanes<Signed>>(Max(), inputs, outputs, count, hints);
    default:
      return reduceBits<PlainLanes<std::uint8_t>>(op, inputs, outputs,
                                                  count * static_cast<std::int64_t>(sizeof(Signed)), hints);
  }
}

void reduceBool(ReduceOp op, Inputs inputs, Outputs outputs, std::int64_t count, const CacheHints& hints) {
  const bool all = op == ReduceOp::And || op == ReduceOp::Product || op == ReduceOp::Min;
  const ReduceOp bits = all ? ReduceOp::And : op == ReduceOp::Xor ? ReduceOp::Xor : ReduceOp::Or;
  reduceBits<BoolLanes>(bits, inputs, outputs, count, hints);
}

void reduceBFloat16(ReduceOp op, Inputs inputs, Outputs outputs, std::int64_t count, const CacheHints& hints) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  if ((op == ReduceOp::Sum || op == ReduceOp::Average) && convertsToBFloat16()) {
    return reduceFloating<NativeBFloat16Lanes>(op, inputs, outputs, count, hints);
  }
#endif
  reduceFloating<HalfLanes<BFloat16Format>>(op, inputs, outputs, count, hints);
}

void reduceOnTarget(ReduceOp op, DType dtype, Inputs inputs, Outputs outputs, std::int64_t count,
                    const CacheHints& hints) {
  switch (dtype) {
    case DType::Float32:
      return reduceFloating<PlainLanes<float>>(op, inputs, outputs, count, hints);
    case DType::Float64:
      return reduceFloating<PlainLanes<double>>(op, inputs, outputs, count, hints);
    case DType::Float16:
      return reduceFloating<HalfLanes<Float16Format>>(op, inputs, outputs, count, hints);
    case DType::BFloat16:
      return reduceBFloat16(op, inputs, outputs, count, hints);
    case DType::Int8:
      return reduceInteger<std::int8_t, std::uint8_t>(op, inputs, outputs, count, hints);
    case DType::Int16:
      return reduceInteger<std::int16_t, std::uint16_t>(op, inputs, outputs, count, hints);
    case DType::Int32:
      return reduceInteger<std::int32_t, std::uint32_t>(op, inputs, outputs, count, hints);
    case DType::Int64:
      return reduceInteger<std::int64_t, std::uint64_t>(op, inputs, outputs, count, hints);
    case DType::UInt8:
      return reduceInteger<std::uint8_t, std::uint8_t>(op, inputs, outputs, count, hints);
    case DType::Bool:
      return reduceBool(op, inputs, outputs, count, hints);
  }
}

void streamOnTarget(std::byte* to, const std::byte* from, std::size_t bytes) {
  using Lanes = PlainLanes<std::uint8_t>;
  constexpr std::size_t kStep = Lanes::kBytes;
  std::size_t at = std::min(bytes, bytesToLine(to));
  std::memcpy(to, from, at);
  for (; bytes - at >= 4 * kStep; at += 4 * kStep) {
    const auto a = Lanes::load(from + at);
    const auto b = Lanes::load(from + at + kStep);
    const auto c = Lanes::load(from + at + 2 * kStep);
    const auto d = Lanes::load(from + at + 3 * kStep);
    Lanes::stream(a, to + at);
    Lanes::stream(b, to + at + kStep);
    Lanes::stream(c, to + at + 2 * kStep);
    Lanes::stream(d, to + at + 3 * kStep);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

const char* nameOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace dc::shm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace dc::shm {

HWY_EXPORT(reduceOnTarget);
HWY_EXPORT(streamOnTarget);
HWY_EXPORT(nameOfTarget);

void reduceRanks(ReduceOp op, DType dtype, std::span<const std::byte* const> inputs,
                 std::span<std::byte* const> outputs, std::int64_t count, const CacheHints& hints) {
  check(supports(op, dtype), [&] { return concat("shm::reduce: no ", name(op), " of ", name(dtype)); });
  check(!inputs.empty() && !outputs.empty() && count >= 0, [&] {
    return concat("shm::reduce: ", inputs.size(), " inputs, ", outputs.size(), " outputs and ", count,
                  " elements; needs at least one input and one output");
  });
  HWY_DYNAMIC_DISPATCH(reduceOnTarget)(op, dtype, inputs, outputs, count, hints);
  if (hints.streaming) {
    hwy::FlushStream();
  }
}

void copyBytes(std::byte* to, const std::byte* from, std::int64_t bytes, bool streaming) {
  check(bytes >= 0, [&] { return concat("shm::copy: ", bytes, " bytes"); });
  const auto size = static_cast<std::size_t>(bytes);
  if (size == 0) {  // the pointers may be null then, which memcpy does not take
    return;
  }
  if (!streaming) {
    std::memcpy(to, from, size);
    return;
  }
  HWY_DYNAMIC_DISPATCH(streamOnTarget)(to, from, size);
  hwy::FlushStream();
}

std::string_view simdTarget() { return HWY_DYNAMIC_DISPATCH(nameOfTarget)(); }

}  // namespace dc::shm

#endif  // HWY_ONCE
