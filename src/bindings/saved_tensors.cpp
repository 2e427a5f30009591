// What autograd saves of a gathered parameter: packed as its id, gathered again when unpacked.
#include <optional>
#include <tuple>

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/base/error.h"
#include "deepcompile/bindings/bindings.h"
#include "deepcompile/ops/saved_tensor_hooks.h"
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
  // Nor is one that was changed in place the parameter any more.
  if (!key || tensor.scalar_type() != key->dtype || (!tensor.is_inference() && tensor._version() != 0)) {
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
    parameter = graph->z3->gatherer().readAgain(saved.key);
  }
  return parameter.as_strided(saved.sizes, saved.strides, saved.offset);
}

// The Python functions that pack and unpack; owned for the life of the process.
PyObject* pack_hook = nullptr;
PyObject* unpack_hook = nullptr;

bool isOurs(const std::pair<c10::SafePyObject, c10::SafePyObject>& hooks) {
  return hooks.first.ptr(getPyInterpreter()) == pack_hook;
}

void install() {
  using Hooks = at::SavedTensorDefaultHooks;
  if (!Hooks::get_tls_state().stack.empty() || !Hooks::is_enabled()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  Py_INCREF(pack_hook);
  Py_INCREF(unpack_hook);
  Hooks::lazy_initialize();
  Hooks::push_hooks(c10::SafePyObject(pack_hook, getPyInterpreter()),
                    c10::SafePyObject(unpack_hook, getPyInterpreter()));
}

void uninstall() {
  using Hooks = at::SavedTensorDefaultHooks;
  const auto& stack = Hooks::get_tls_state().stack;
  if (!stack.empty() && isOurs(stack.top())) {
    Hooks::pop_hooks();
  }
}

}  // namespace

void bindSavedTensors(py::module_& module) {
  py::class_<SavedParameter>(module, "SavedParameter");
  module.def("pack_parameter", &pack, "None for a tensor that is not a gathered parameter.");
  module.def("unpack_parameter", &unpack, py::call_guard<py::gil_scoped_release>());
  module.def(
      "set_saved_tensor_hooks",
      [](const py::object& pack, const py::object& unpack) {
        pack_hook = py::object(pack).release().ptr();
        unpack_hook = py::object(unpack).release().ptr();
        ops::savedTensorHooks() = {&install, &uninstall};
      },
      py::arg("pack"), py::arg("unpack"));
  module.def("keep_gathered_as_ids", &install, py::call_guard<py::gil_scoped_release>());
  module.def("stop_keeping_gathered_as_ids", &uninstall, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dc
