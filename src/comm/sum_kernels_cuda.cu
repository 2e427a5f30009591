// Every block writes the sum of its part, and one block adds those up: no atomics, so the same bits every time. Memory
// bandwidth bounds it.
#include <cuda_runtime.h>

#include <cstdint>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "deepcompile/comm/pieces_cuda.h"
#include "deepcompile/comm/sum_kernels_cuda.h"

namespace dc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr std::int64_t kElementsPerBlock = 1 << 16;

// Of all threads, in thread 0.
__device__ double overBlock(double value) {
  __shared__ double warps[kThreads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffU, value, distance);
  }
  if (threadIdx.x % kWarp == 0) {
    warps[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      sum += warps[warp];
    }
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) squaresKernel(const __grid_constant__ Launch launch, double* partials) {
  const Part part = partOf(launch, kElementsPerBlock);
  const T* from = static_cast<const T*>(launch.pieces[part.piece].from) + part.begin;
  constexpr int kWidth = 16 / sizeof(T);
  using FromVector = Vector<T, kWidth>;
  double sum = 0;
  std::int64_t done = 0;
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(FromVector) == 0) {
    const std::int64_t vectors = part.size / kWidth;
    for (std::int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const FromVector in = reinterpret_cast<const FromVector*>(from)[v];
      float squares = 0;  // of a few numbers, so that 64-bit additions are few
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float x = static_cast<float>(in.values[i]);
        squares += x * x;
      }
      sum += static_cast<double>(squares);
    }
    done = vectors * kWidth;
  }
  for (std::int64_t i = done + threadIdx.x; i < part.size; i += kThreads) {
    const float x = static_cast<float>(from[i]);
    sum += static_cast<double>(x * x);
  }
  sum = overBlock(sum);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) addUpKernel(const double* partials, std::int64_t count, double* result) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    sum += partials[i];
  }
  sum = overBlock(sum);
  if (threadIdx.x == 0) {
    *result = sum;
  }
}

using Kernel = void (*)(Launch, double*);

Kernel squaresKernelOf(Number number) {
  switch (number) {
    case Number::Float:
      return squaresKernel<float>;
    case Number::Half:
      return squaresKernel<c10::Half>;
    case Number::BFloat16:
      return squaresKernel<c10::BFloat16>;
  }
  return nullptr;
}

}  // namespace

std::int64_t partialsOf(const Piece* pieces, int count) {
  std::int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    blocks += blocksFor(pieces[i], kElementsPerBlock);
  }
  return blocks;
}

cudaError_t squaresOf(Number number, const Piece* pieces, int count, double* partials, cudaStream_t stream) {
  const Kernel kernel = squaresKernelOf(number);
  return inLaunches(pieces, count, kElementsPerBlock, [&](const Launch& launch, int blocks) {
    kernel<<<blocks, kThreads, 0, stream>>>(launch, partials);
    partials += blocks;
    return cudaGetLastError();
  });
}

cudaError_t addUp(const double* partials, std::int64_t count, double* sum, cudaStream_t stream) {
  addUpKernel<<<1, kThreads, 0, stream>>>(partials, count, sum);
  return cudaGetLastError();
}

}  // namespace dc::cuda
