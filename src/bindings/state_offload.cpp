// An optimizer's states between device and host.
#include "deepcompile/runtime/state_offload.h"

#include <utility>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/bindings/bindings.h"

namespace dc {
namespace {

namespace py = pybind11;

using Ids = std::vector<std::int64_t>;

}  // namespace

void bindStateOffload(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<StateOffload, std::shared_ptr<StateOffload>>(module, "StateOffload")
      .def("set", &StateOffload::set, py::arg("ds_id"), py::arg("tensors"), py::arg("name"), NoGil())
      .def(
          "move",
          [](StateOffload& states, Ids leave, Ids free, Ids fetch) {
            states.move({std::move(leave), std::move(free), std::move(fetch)});
          },
          py::arg("leave"), py::arg("free"), py::arg("fetch"), NoGil())
      .def(
          "require", [](StateOffload& states, const Ids& ids) { states.require(ids); }, py::arg("ds_ids"), NoGil())
      .def("allow_returns", &StateOffload::allowReturns, py::arg("allowed"), NoGil())
      .def("settle", &StateOffload::settle, NoGil())
      .def_property_readonly("bytes_away", py::cpp_function(&StateOffload::bytesAway, NoGil()))
      .def_property_readonly("away", py::cpp_function(&StateOffload::away, NoGil()));
}

}  // namespace dc
