// Copies of many pieces in one launch, with a cast; and a delay for tests. Memory bandwidth bounds the copies.
#include <cuda_runtime.h>

#include <cstdint>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "deepcompile/comm/copy_kernels_cuda.h"
#include "deepcompile/comm/driver_kernel_cuda.h"
#include "deepcompile/comm/pieces_cuda.h"

namespace dc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 16;
constexpr std::int64_t kElementsPerBlock = kThreads * kElementsPerThread;
constexpr int kFewPieces = 16;

// 16 bytes of the wider type at a time where both ends are aligned for it.
template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) copyKernel(const __grid_constant__ Launch launch) {
  const Part part = partOf(launch, kElementsPerBlock);
  const Piece& work = launch.pieces[part.piece];
  const From* from = static_cast<const From*>(work.from) + part.begin;
  To* to = static_cast<To*>(work.to) + part.begin;

  constexpr int kWidth = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  using FromVector = Vector<From, kWidth>;
  using ToVector = Vector<To, kWidth>;
  std::int64_t done = 0;
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % sizeof(FromVector) == 0 &&
                       reinterpret_cast<std::uintptr_t>(to) % sizeof(ToVector) == 0;
  if (aligned) {
    const std::int64_t vectors = part.size / kWidth;
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
  for (std::int64_t i = done + threadIdx.x; i < part.size; i += kThreads) {
    to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

// Bits as they are, for every type. A block takes fewer words where there is only one piece, so that more take part.
template <typename Word, typename SomeLaunch, std::int64_t kPerBlock>
__global__ void __launch_bounds__(kThreads) moveKernel(const __grid_constant__ SomeLaunch launch) {
  const Part part = partOf(launch, kPerBlock);
  const Piece& work = launch.pieces[part.piece];
  const Word* from = static_cast<const Word*>(work.from) + part.begin;
  Word* to = static_cast<Word*>(work.to) + part.begin;
  for (std::int64_t i = threadIdx.x; i < part.size; i += kThreads) {
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

// The fewer pieces a launch has room for, the less of it the host has to write.
template <int kMost, std::int64_t kPerBlock>
cudaError_t moveInLaunchesOf(const Piece* pieces, int count, cudaStream_t stream) {
  using SomeLaunch = LaunchOf<Piece, kMost>;
  static DriverKernel kernel(reinterpret_cast<const void*>(&moveKernel<uint4, SomeLaunch, kPerBlock>));
  return inLaunches<SomeLaunch>(pieces, count, kPerBlock, [&](SomeLaunch& launch, int blocks) {
    return kernel.launch(blocks, kThreads, &launch, stream);
  });
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
  const Kernel kernel = castKernel(to, from);
  return inLaunches(pieces, count, kElementsPerBlock, [&](const Launch& launch, int blocks) {
    kernel<<<blocks, kThreads, 0, stream>>>(launch);
    return cudaGetLastError();
  });
}

cudaError_t movePieces(const Piece* pieces, int count, cudaStream_t stream) {
  if (count == 1) {
    return moveInLaunchesOf<1, 4 * kThreads>(pieces, count, stream);
  }
  if (count <= kFewPieces) {
    return moveInLaunchesOf<kFewPieces, kElementsPerBlock>(pieces, count, stream);
  }
  return moveInLaunchesOf<kMostPieces, kElementsPerBlock>(pieces, count, stream);
}

cudaError_t delay(std::int64_t microseconds, cudaStream_t stream) {
  delayKernel<<<1, 1, 0, stream>>>(microseconds * 1000);
  return cudaGetLastError();
}

}  // namespace dc::cuda
