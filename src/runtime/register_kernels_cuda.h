// Makes our CUDA kernels those of DeviceKernels for CUDA tensors.
#pragma once

namespace dc::cuda {

void registerKernels();

}  // namespace dc::cuda
