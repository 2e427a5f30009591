// Copies of many pieces in one launch, with a cast; and a delay for tests. Memory bandwidth bounds the copies.
#include "deepcompile/comm/copy_kernels_cuda.h"

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace dc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 16;
constexpr std::int64_t kElementsPerBlock = kThreads * kElementsPerThread;

// Passed by value: kernel arguments may have 4 KiB.
struct Launch {
  Piece pieces[kMostPieces];
  int first_block[kMostPieces + 1];
  int count;
};

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

// 16 bytes of the wider type at a time where both ends are aligned for it.
template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) copyKernel(const __grid_constant__ Launch launch) {
  int piece = 0;
  while (piece + 1 < launch.count && static_cast<int>(blockIdx.x) >= launch.first_block[piece + 1]) {
    ++piece;
  }
  const Piece& work = launch.pieces[piece];
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - launch.first_block[piece]) * kElementsPerBlock;
  const std::int64_t rest = work.count - begin;
  const std::int64_t size = rest < kElementsPerBlock ? rest : kElementsPerBlock;
  const From* from = static_cast<const From*>(work.from) + begin;
  To* to = static_cast<To*>(work.to) + begin;

  constexpr int kWidth = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  using FromVector = Vector<From, kWidth>;
  using ToVector = Vector<To, kWidth>;
  std::int64_t done = 0;
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % sizeof(FromVector) == 0 &&
                       reinterpret_cast<std::uintptr_t>(to) % sizeof(ToVector) == 0;
  if (aligned) {
    const std::int64_t vectors = size / kWidth;
    for (std::int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const FromVector in = reinterpret_cast<const FromVector*>(from)[v];
      ToVector out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        out.values[i] = static_cast<To>(static_cast<float>(in.values[i]));
      }
      reinterpret_cast<ToVector*>(to)[v] = out;
    }
    done = vectors * kWidth;
  }
  for (std::int64_t i = done + threadIdx.x; i < size; i += kThreads) {
    to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

// Bits as they are, for every type.
template <typename Word>
__global__ void __launch_bounds__(kThreads) moveKernel(const __grid_constant__ Launch launch) {
  int piece = 0;
  while (piece + 1 < launch.count && static_cast<int>(blockIdx.x) >= launch.first_block[piece + 1]) {
    ++piece;
  }
  const Piece& work = launch.pieces[piece];
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - launch.first_block[piece]) * kElementsPerBlock;
  const std::int64_t rest = work.count - begin;
  const std::int64_t size = rest < kElementsPerBlock ? rest : kElementsPerBlock;
  const Word* from = static_cast<const Word*>(work.from) + begin;
  Word* to = static_cast<Word*>(work.to) + begin;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    to[i] = from[i];
  }
}

__global__ void delayKernel(std::int64_t nanoseconds) {
  std::uint64_t start = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  std::uint64_t now = start;
  while (now - start < static_cast<std::uint64_t>(nanoseconds)) {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }
}

using Kernel = void (*)(Launch);

cudaError_t launchAll(Kernel kernel, const Piece* pieces, int count, cudaStream_t stream) {
  for (int begin = 0; begin < count; begin += kMostPieces) {
    Launch launch;
    launch.count = std::min(count - begin, kMostPieces);
    int blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.pieces[i] = pieces[begin + i];
      launch.first_block[i] = blocks;
      blocks += static_cast<int>((pieces[begin + i].count + kElementsPerBlock - 1) / kElementsPerBlock);
    }
    launch.first_block[launch.count] = blocks;
    if (blocks > 0) {
      kernel<<<blocks, kThreads, 0, stream>>>(launch);
    }
  }
  return cudaGetLastError();
}

template <typename To>
Kernel castFrom(Number from) {
  switch (from) {
    case Number::Float:
      return copyKernel<To, float>;
    case Number::Half:
      return copyKernel<To, c10::Half>;
    case Number::BFloat16:
      return copyKernel<To, c10::BFloat16>;
  }
  return nullptr;
}

Kernel castKernel(Number to, Number from) {
  switch (to) {
    case Number::Float:
      return castFrom<float>(from);
    case Number::Half:
      return castFrom<c10::Half>(from);
    case Number::BFloat16:
      return castFrom<c10::BFloat16>(from);
  }
  return nullptr;
}

}  // namespace

cudaError_t castPieces(Number to, Number from, const Piece* pieces, int count, cudaStream_t stream) {
  return launchAll(castKernel(to, from), pieces, count, stream);
}

cudaError_t movePieces(const Piece* pieces, int count, cudaStream_t stream) {
  return launchAll(moveKernel<uint4>, pieces, count, stream);
}

cudaError_t delay(std::int64_t microseconds, cudaStream_t stream) {
  delayKernel<<<1, 1, 0, stream>>>(microseconds * 1000);
  return cudaGetLastError();
}

}  // namespace dc::cuda
