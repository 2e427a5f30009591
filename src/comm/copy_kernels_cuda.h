// Our CUDA kernels, as functions that enqueue on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dc::cuda {

struct Piece {
  const void* from;
  void* to;
  std::int64_t count;  // of elements
};

// Pieces that fit the arguments of one launch; more take several.
constexpr int kMostPieces = 128;

enum class Number { Float, Half, BFloat16 };

// Casts every piece, rounding to nearest even.
cudaError_t castPieces(Number to, Number from, const Piece* pieces, int count, cudaStream_t stream);
// Moves every piece as it is; counts are of 16-byte words, and both ends are aligned to them.
cudaError_t movePieces(const Piece* pieces, int count, cudaStream_t stream);
// Keeps the stream busy for about this long.
cudaError_t delay(std::int64_t microseconds, cudaStream_t stream);

}  // namespace dc::cuda
