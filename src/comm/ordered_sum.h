// The sum over ranks, the same bits on every rank and for every grouping.
#pragma once

#include <ATen/core/Tensor.h>

namespace dc {

// `rows` is [ranks, n], floating point or complex. Adds the rows from the first to the last; 16-bit types are added in
// fp32 and rounded once. With `average` the sum is divided by the number of rows before it is rounded. Consumes `rows`.
at::Tensor sumInRankOrder(const at::Tensor& rows, bool average);

}  // namespace dc
