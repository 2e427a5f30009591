#include "deepcompile/runtime/device_kernels.h"

#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/environment.h"

namespace dc {
namespace {

std::array<DeviceKernels*, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> kernels_of{};

DeviceKernels* find(at::DeviceType type) { return kernels_of[static_cast<std::size_t>(type)]; }

}  // namespace

void setDeviceKernels(at::DeviceType type, DeviceKernels* kernels) {
  kernels_of[static_cast<std::size_t>(type)] = kernels;
}

void copyParts(std::span<const CopyPart> parts) {
  if (parts.empty()) {
    return;
  }
  if (DeviceKernels* kernels = find(parts[0].to.device().type()); kernels != nullptr) {
    kernels->copy(parts);
    return;
  }
  for (const CopyPart& part : parts) {
    copyElements(part);
  }
}

void copyElements(const CopyPart& part) {
  if (part.to.sizes() == part.from.sizes()) [[likely]] {
    part.to.copy_(part.from, /*non_blocking=*/true);
  } else {
    part.to.view({-1}).copy_(part.from.reshape({-1}), /*non_blocking=*/true);
  }
}

at::Tensor sumOfSquares(const std::vector<at::Tensor>& tensors, at::Device device) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble).device(device);
  if (tensors.empty()) {
    return at::zeros({}, options);
  }
  if (DeviceKernels* kernels = find(device.type()); kernels != nullptr) {
    if (auto sum = kernels->sumOfSquares(tensors)) {
      return *std::move(sum);
    }
  }
  const auto any = [&](auto&& holds) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) { return holds(tensor); });
  };
  std::vector<at::Tensor> norms;
  if (any([](const at::Tensor& tensor) { return tensor.is_complex(); })) {
    for (const at::Tensor& tensor : tensors) {
      norms.push_back(at::linalg_vector_norm(tensor, 2).to(at::kDouble));
    }
  } else {
    const bool wide = any([](const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; });
    norms = at::_foreach_norm(tensors, 2, wide ? at::kDouble : at::kFloat);
  }
  return at::stack(norms).to(at::kDouble).square().sum();
}

void delayForDebugging(at::Device device) {
  static const std::int64_t most = Environment::read().stream_delay_us;
  if (most <= 0) [[likely]] {
    return;
  }
  if (DeviceKernels* kernels = find(device.type()); kernels != nullptr) {
    thread_local std::mt19937_64 random(std::random_device{}());
    kernels->delay(device, static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most)));
  }
}

}  // namespace dc
