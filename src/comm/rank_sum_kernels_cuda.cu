// Every thread reads the same elements of all ranks. The links between the GPUs bound it, or memory where there is one.
#include <cuda_runtime.h>

#include <cstdint>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "deepcompile/comm/pieces_cuda.h"
#include "deepcompile/comm/rank_sum_kernels_cuda.h"

namespace dc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kElementsPerBlock = kThreads * 16;
constexpr int kPiecesOfSum = 90;

using SumLaunch = LaunchOf<SumPiece, kPiecesOfSum>;
static_assert(sizeof(SumLaunch) + sizeof(RankBases) + sizeof(bool) <= 4096, "more than a launch's arguments may have");

__device__ inline const void* sourceOf(const RankBases& bases, const SumPiece& piece, int rank) {
  return rank == bases.mine ? piece.own : static_cast<const char*>(bases.of_rank[rank]) + piece.offset;
}

__device__ inline float finished(float sum, const RankBases& bases, bool average) {
  return average ? sum / static_cast<float>(bases.ranks) : sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sumKernel(const __grid_constant__ SumLaunch launch, const __grid_constant__ RankBases bases, bool average) {
  const Part part = partOf(launch, kElementsPerBlock);
  const SumPiece& piece = launch.pieces[part.piece];
  T* to = static_cast<T*>(piece.to) + part.begin;
  constexpr int kWidth = 16 / sizeof(T);
  using Many = Vector<T, kWidth>;
  const auto address = [](const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); };
  std::int64_t done = 0;
  if ((address(piece.to) | address(piece.own) | static_cast<std::uintptr_t>(piece.offset)) % sizeof(Many) == 0) {
    const std::int64_t vectors = part.size / kWidth;
    for (std::int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      float sums[kWidth];
      for (int rank = 0; rank < bases.ranks; ++rank) {
        const T* from = static_cast<const T*>(sourceOf(bases, piece, rank)) + part.begin;
        const Many in = reinterpret_cast<const Many*>(from)[v];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float value = static_cast<float>(in.values[i]);
          sums[i] = rank == 0 ? value : sums[i] + value;
        }
      }
      Many out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        out.values[i] = static_cast<T>(finished(sums[i], bases, average));
      }
      reinterpret_cast<Many*>(to)[v] = out;
    }
    done = vectors * kWidth;
  }
  for (std::int64_t i = done + threadIdx.x; i < part.size; i += kThreads) {
    float sum = 0;
    for (int rank = 0; rank < bases.ranks; ++rank) {
      const float value = static_cast<float>(static_cast<const T*>(sourceOf(bases, piece, rank))[part.begin + i]);
      sum = rank == 0 ? value : sum + value;
    }
    to[i] = static_cast<T>(finished(sum, bases, average));
  }
}

using Kernel = void (*)(SumLaunch, RankBases, bool);

Kernel sumKernelOf(Number number) {
  switch (number) {
    case Number::Float:
      return sumKernel<float>;
    case Number::Half:
      return sumKernel<c10::Half>;
    case Number::BFloat16:
      return sumKernel<c10::BFloat16>;
  }
  return nullptr;
}

}  // namespace

cudaError_t sumOverRanks(Number number, const RankBases& bases, bool average, const SumPiece* pieces, int count,
                         cudaStream_t stream) {
  const Kernel kernel = sumKernelOf(number);
  return inLaunches<SumLaunch>(pieces, count, kElementsPerBlock, [&](const SumLaunch& launch, int blocks) {
    kernel<<<blocks, kThreads, 0, stream>>>(launch, bases, average);
    return cudaGetLastError();
  });
}

}  // namespace dc::cuda
