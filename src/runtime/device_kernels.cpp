#include "deepcompile/runtime/device_kernels.h"

#include <array>
#include <random>

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
    part.to.copy_(part.from);
  }
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
