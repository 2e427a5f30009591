// Several shapes as an operator's schema can have them: all sizes in a row, and how many of them are each shape's.
#pragma once

#include <cstddef>

#include <c10/util/ArrayRef.h>

#include "deepcompile/base/error.h"

namespace dc::ops {

// use(i, shape) for each of `count` shapes. Throws where the numbers do not fit together.
template <typename Use>
void eachShape(std::size_t count, c10::IntArrayRef shapes, c10::IntArrayRef dims, Use&& use) {
  check(count == dims.size(), [&] { return concat("gather_shards: ", count, " shards and ", dims.size(), " shapes"); });
  std::size_t at = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto rank = static_cast<std::size_t>(dims[i]);
    check(dims[i] >= 0 && at + rank <= shapes.size(), "gather_shards: the shapes have fewer sizes than they should");
    use(i, shapes.slice(at, rank));
    at += rank;
  }
}

}  // namespace dc::ops
