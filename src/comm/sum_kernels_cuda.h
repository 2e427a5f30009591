// The sum of the squares of many tensors, in the same order every time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "deepcompile/comm/copy_kernels_cuda.h"

namespace dc::cuda {

// How many partial sums squaresOf() makes.
std::int64_t partialsOf(const Piece* pieces, int count);
// Writes them to `partials`. Only `from` of a piece is read.
cudaError_t squaresOf(Number number, const Piece* pieces, int count, double* partials, cudaStream_t stream);
// Adds up `count` numbers.
cudaError_t addUp(const double* partials, std::int64_t count, double* sum, cudaStream_t stream);

}  // namespace dc::cuda
