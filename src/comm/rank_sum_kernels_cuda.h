// The sum, over ranks, of memory that every rank can read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "deepcompile/comm/copy_kernels_cuda.h"

namespace dc::cuda {

// As many as PyTorch lets share memory.
constexpr int kMostSummedRanks = 72;

// Where the ranks' contributions lie: those of peers at the same offset from each one's base, the caller's own
// anywhere.
struct RankBases {
  const void* of_rank[kMostSummedRanks];
  int ranks;
  int mine;
};

struct SumPiece {
  std::int64_t offset;  // bytes from a peer's base
  const void* own;
  void* to;
  std::int64_t count;  // of elements
};

// Sums every piece in rank order, in fp32, and rounds once; with `average` divides before the rounding.
cudaError_t sumOverRanks(Number number, const RankBases& bases, bool average, const SumPiece* pieces, int count,
                         cudaStream_t stream);

}  // namespace dc::cuda
