// Element-wise reduction of buffers that this process can read, by the best SIMD instructions of the machine.
//
// The result is a function of the inputs and of their order alone: no instruction set, vector width, alignment or place
// of an element in the buffer changes a bit of it. So ranks that reduce the same inputs on different machines agree.
//   - float16 and bfloat16 accumulate in float32 and are rounded once, to nearest even, at the end; float32 and float64
//     accumulate in their own type. Average divides the sum by the number of inputs before that rounding.
//   - Min and Max of floating-point numbers are NaN if one input is; of equal ones (-0 and 0) the first wins.
//   - Every NaN of a result is the positive quiet NaN without payload, even with one input: which of two payloads an
//     addition keeps is the compiler's choice.
//   - Integers wrap around. A bool is true if its byte is not zero; results are 0 or 1, Sum and Max are Or, Product and
//     Min are And.
// The rounding mode and the flushing of denormals are those of the calling thread; the above holds where they are
// equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "deepcompile/shm/dtype.h"

namespace dc::shm {

// How the caches are best used; no bit of a result depends on it.
struct CacheHints {
  // Stores that leave the result out of the caches, for outputs that nobody reads soon. Applies to outputs that are all
  // equally far from a multiple of 64 bytes, a multiple of the element.
  bool streaming = false;
  // What the caller reads next, as many bytes as an input has: it is fetched beside the arithmetic, so that memory does
  // not rest meanwhile. Never dereferenced; it may reach past the end of its buffer.
  const std::byte* read_next = nullptr;
};

// outputs[.][i] = op over r = 0, 1, ... of inputs[r][i], in that order, for i < count. All outputs get the same bits.
// An output may be one of the inputs exactly but overlaps nothing otherwise. No pointer needs any alignment.
// Streaming stores are done before the function returns, as seen by one who acquires what the caller releases
// afterwards. Throws dc::Error if `op` does not support `dtype` or there is no input or no output.
void reduceRanks(ReduceOp op, DType dtype, std::span<const std::byte* const> inputs,
                 std::span<std::byte* const> outputs, std::int64_t count, const CacheHints& hints = {});

// memcpy, with the meaning of CacheHints::streaming. The regions do not overlap.
void copyBytes(std::byte* to, const std::byte* from, std::int64_t bytes, bool streaming = false);

// The instruction set that reduce and copy use, for logs and tests: "AVX3", "AVX2", "SSE4", "SCALAR", "NEON". Tests
// choose another one by hwy::SetSupportedTargetsForTest.
std::string_view simdTarget();

}  // namespace dc::shm
