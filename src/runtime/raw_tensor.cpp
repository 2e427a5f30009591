#include "deepcompile/runtime/raw_tensor.h"

#include <optional>
#include <utility>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

namespace dc {
namespace {

// Leaves inference mode, at no cost where it is off.
struct NotForInference {
  std::optional<c10::InferenceMode> left;
  NotForInference() {
    if (c10::InferenceMode::is_enabled()) {
      left.emplace(false);
    }
  }
};

}  // namespace

at::Tensor tensorOver(c10::DataPtr data, std::int64_t bytes, at::IntArrayRef sizes, at::ScalarType dtype,
                      at::Device device) {
  // The first gather may be for inference, and the copy may then be reused by a training step.
  const NotForInference guard;
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor aliasOf(const at::Tensor& tensor) {
  const NotForInference guard;
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                          /*allow_tensor_metadata_change=*/true));
}

at::Tensor rawTensor(void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const std::int64_t bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  return tensorOver(c10::DataPtr(data, device), bytes, sizes, dtype, device);
}

}  // namespace dc
