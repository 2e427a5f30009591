// What a rank means by a collective call. Every rank publishes it with its data and compares it with its peers', so
// that ranks which mean different things get an error instead of wrong numbers.
#pragma once

#include <cstdint>
#include <string>

#include "deepcompile/shm/dtype.h"

namespace dc::shm {

enum class Kind : std::uint8_t {
  AllReduce,
  AllGather,
  ReduceScatter,
  Broadcast,
  Reduce,
  Gather,
  Scatter,
  AllToAll,
  Barrier,
  Tune,
};

// In shared memory: plain data of a fixed size.
struct Meaning {
  Kind kind = Kind::Barrier;
  DType dtype = DType::UInt8;   // of reductions; what moves bytes alone has none
  ReduceOp op = ReduceOp::Sum;  // of reductions
  std::uint8_t reduces = 0;     // 1 where dtype and op count
  std::int32_t root = -1;       // -1: none
  std::int64_t count = 0;       // elements of a reduction, else bytes
  std::uint64_t tag = 0;        // what the caller says it is about; 0: nothing
  bool operator==(const Meaning&) const = default;
};
static_assert(sizeof(Meaning) == 24);

// As users read it: "all_reduce(sum, float32, 1024 elements)".
std::string text(const Meaning& meaning);

}  // namespace dc::shm
