#include "deepcompile/runtime/register_kernels_cuda.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "deepcompile/comm/copy_kernels_cuda.h"
#include "deepcompile/comm/numbers_cuda.h"
#include "deepcompile/comm/sum_kernels_cuda.h"
#include "deepcompile/runtime/device_kernels.h"

namespace dc::cuda {
namespace {

// True if the elements are contiguous and stored as their values: a gradient may be expanded, or lazily conjugated.
bool plain(const CopyPart& part) {
  return part.from.is_contiguous() && part.to.is_contiguous() && !part.from.is_conj() && !part.from.is_neg();
}

constexpr std::size_t kWord = 16;  // bytes that a thread moves at once

// A kernel launch costs the host a fifth less than cudaMemcpyAsync; above this size the difference is negligible.
constexpr std::size_t kMovedByKernel = 4 << 20;

std::size_t wordsOf(const CopyPart& part) { return part.to.nbytes() / kWord; }

bool movable(const CopyPart& part) {
  return part.from.scalar_type() == part.to.scalar_type() && part.from.nbytes() % kWord == 0 &&
         reinterpret_cast<std::uintptr_t>(part.from.const_data_ptr()) % kWord == 0 &&
         reinterpret_cast<std::uintptr_t>(part.to.mutable_data_ptr()) % kWord == 0;
}

class CudaKernels final : public DeviceKernels {
 public:
  void copy(std::span<const CopyPart> parts) override {
    const at::Device where = parts[0].to.device();
    const c10::cuda::CUDAGuard device(where);
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream(where.index()).stream();
    if (parts.size() == 1 && plain(parts[0]) && movable(parts[0]) && parts[0].to.nbytes() <= kMovedByKernel) {
      const Piece piece{parts[0].from.const_data_ptr(), parts[0].to.mutable_data_ptr(),
                        static_cast<std::int64_t>(wordsOf(parts[0]))};
      C10_CUDA_CHECK(movePieces(&piece, 1, stream));
      return;
    }
    if (parts.size() == 1 && plain(parts[0]) && parts[0].from.scalar_type() == parts[0].to.scalar_type()) {
      C10_CUDA_CHECK(cudaMemcpyAsync(parts[0].to.mutable_data_ptr(), parts[0].from.const_data_ptr(),
                                     parts[0].to.nbytes(), cudaMemcpyDeviceToDevice, stream));
      return;
    }
    std::vector<Piece> moves;
    std::map<std::pair<Number, Number>, std::vector<Piece>> casts;
    for (const CopyPart& part : parts) {
      if (!plain(part)) {
        copyElements(part);
        continue;
      }
      const auto to = numberOf(part.to.scalar_type());
      const auto from = numberOf(part.from.scalar_type());
      const Piece piece{part.from.const_data_ptr(), part.to.mutable_data_ptr(), part.to.numel()};
      if (movable(part)) {
        moves.push_back({piece.from, piece.to, static_cast<std::int64_t>(wordsOf(part))});
      } else if (to && from) {
        casts[{*to, *from}].push_back(piece);
      } else {
        copyElements(part);
      }
    }
    C10_CUDA_CHECK(movePieces(moves.data(), static_cast<int>(moves.size()), stream));
    for (const auto& [types, pieces] : casts) {
      C10_CUDA_CHECK(castPieces(types.first, types.second, pieces.data(), static_cast<int>(pieces.size()), stream));
    }
  }

  std::optional<at::Tensor> sumOfSquares(std::span<const at::Tensor> tensors) override {
    std::map<Number, std::vector<Piece>> pieces;
    for (const at::Tensor& tensor : tensors) {
      const auto number = numberOf(tensor.scalar_type());
      if (!number || !tensor.is_contiguous() || tensor.is_neg() || tensor.device() != tensors[0].device()) {
        return std::nullopt;
      }
      pieces[*number].push_back({tensor.const_data_ptr(), nullptr, tensor.numel()});
    }
    const c10::cuda::CUDAGuard device(tensors[0].device());
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    std::int64_t count = 0;
    for (const auto& [number, some] : pieces) {
      count += partialsOf(some.data(), static_cast<int>(some.size()));
    }
    const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble).device(tensors[0].device());
    const at::Tensor partials = at::empty({count}, options);
    auto* place = static_cast<double*>(partials.mutable_data_ptr());
    for (const auto& [number, some] : pieces) {
      C10_CUDA_CHECK(squaresOf(number, some.data(), static_cast<int>(some.size()), place, stream));
      place += partialsOf(some.data(), static_cast<int>(some.size()));
    }
    at::Tensor sum = at::empty({}, options);
    C10_CUDA_CHECK(addUp(static_cast<const double*>(partials.const_data_ptr()), count,
                         static_cast<double*>(sum.mutable_data_ptr()), stream));
    return sum;
  }

  void delay(at::Device device, std::int64_t microseconds) override {
    C10_CUDA_CHECK(cuda::delay(microseconds, c10::cuda::getCurrentCUDAStream(device.index()).stream()));
  }
};

}  // namespace

void registerKernels() {
  static CudaKernels kernels;
  setDeviceKernels(at::kCUDA, &kernels);
}

}  // namespace dc::cuda
