// What autograd saves of a gathered parameter: packed as its id, gathered again when unpacked.
#include <optional>
#include <tuple>

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/base/error.h"
#include "deepcompile/bindings/bindings.h"
#include "deepcompile/runtime/gathered.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/runtime.h"

namespace dc {
namespace {

namespace py = pybind11;

// A view of a gathered parameter, without its memory.
struct SavedParameter {
  GatherKey key;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset;
};

std::optional<SavedParameter> pack(const at::Tensor& tensor) {
  const auto key = gatherKeyOf(tensor);
  // A view as another dtype is not a view of the parameter's elements: leave it to autograd.
  if (!key || tensor.scalar_type() != key->dtype) {
    return std::nullopt;
  }
  return SavedParameter{*key, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
}

at::Tensor unpack(const SavedParameter& saved) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto graph = GraphTable::global().find(saved.key.graph_id);
  at::Tensor parameter;
  {
    const std::lock_guard lock(graph->runtime->context().mutex);
    check(graph->z3 != nullptr, "a gathered parameter was saved by a graph that gathers nothing");
    parameter = graph->z3->gatherAgain(saved.key);
  }
  return parameter.as_strided(saved.sizes, saved.strides, saved.offset);
}

}  // namespace

void bindSavedTensors(py::module_& module) {
  py::class_<SavedParameter>(module, "SavedParameter");
  module.def("pack_parameter", &pack, "None for a tensor that is not a gathered parameter.");
  module.def("unpack_parameter", &unpack, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dc
