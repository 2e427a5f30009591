// Work on many pieces of memory in few launches, for the kernels in *_cuda.cu: a block works on one part of one piece.
#pragma once

#include <algorithm>
#include <cstdint>

#include "deepcompile/comm/copy_kernels_cuda.h"

namespace dc::cuda {

// Passed by value: kernel arguments may have 4 KiB. A piece of any kind has a count.
template <typename SomePiece, int kMost>
struct LaunchOf {
  using Piece = SomePiece;
  static constexpr int kMostPieces = kMost;
  SomePiece pieces[kMost];
  int first_block[kMost + 1];
  int count;
};
using Launch = LaunchOf<Piece, kMostPieces>;

// What the calling block works on.
struct Part {
  int piece;
  std::int64_t begin;  // element of the piece
  std::int64_t size;
};

template <typename SomeLaunch>
__device__ Part partOf(const SomeLaunch& launch, std::int64_t per_block) {
  int piece = 0;
  while (piece + 1 < launch.count && static_cast<int>(blockIdx.x) >= launch.first_block[piece + 1]) {
    ++piece;
  }
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - launch.first_block[piece]) * per_block;
  const std::int64_t rest = launch.pieces[piece].count - begin;
  return {piece, begin, rest < per_block ? rest : per_block};
}

template <typename SomePiece>
int blocksFor(const SomePiece& piece, std::int64_t per_block) {
  return static_cast<int>((piece.count + per_block - 1) / per_block);
}

// Calls start(launch, blocks) for every launch that has something to do, until one fails.
template <typename SomeLaunch = Launch, typename Start>
cudaError_t inLaunches(const typename SomeLaunch::Piece* pieces, int count, std::int64_t per_block, Start&& start) {
  for (int begin = 0; begin < count; begin += SomeLaunch::kMostPieces) {
    SomeLaunch launch;
    launch.count = std::min(count - begin, SomeLaunch::kMostPieces);
    int blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.pieces[i] = pieces[begin + i];
      launch.first_block[i] = blocks;
      blocks += blocksFor(pieces[begin + i], per_block);
    }
    launch.first_block[launch.count] = blocks;
    if (blocks > 0) {
      if (const cudaError_t error = start(launch, blocks); error != cudaSuccess) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

}  // namespace dc::cuda
