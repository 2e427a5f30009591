// The log of what happens in steps, which Python reads.
#include "deepcompile/runtime/step_trace.h"

#include <array>

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/bindings/bindings.h"

namespace dc {
namespace {

namespace py = pybind11;

constexpr std::array<const char*, 8> kKindNames = {"read",         "group",       "release", "gradient",
                                                   "end_backward", "begin_graph", "gather",  "reduction"};

py::tuple stopTrace(StepTrace& trace, StepTrace::Reader reader) {
  StepTrace::Taken taken;
  {
    const py::gil_scoped_release no_gil;  // a device is waited for
    taken = trace.stop(reader);
  }
  py::list list(taken.entries.size());
  for (std::size_t i = 0; i < taken.entries.size(); ++i) {
    const TraceEntry& one = taken.entries[i];
    list[i] = py::make_tuple(kKindNames[static_cast<std::size_t>(one.kind)], one.id, one.dtype, one.bytes, one.backward,
                             one.gathers, one.iteration, one.micro, one.start, one.launched, one.end);
  }
  return py::make_tuple(list, taken.ended, taken.compiled_code);
}

}  // namespace

void bindStepTrace(py::module_& module) {
  py::class_<StepTrace, std::shared_ptr<StepTrace>>(module, "StepTrace")
      .def("start", &StepTrace::start, py::arg("releases") = false, py::call_guard<py::gil_scoped_release>(),
           "A reader of what is logged from here on; stop or drop it.")
      .def("stop", &stopTrace, py::arg("reader"),
           "(entries, when it was stopped, whether compiled code handed over gradients); see step_trace.py.")
      .def("drop", &StepTrace::drop, py::arg("reader"))
      .def_property_readonly("on", &StepTrace::on, "Whether somebody reads.")
      .def(
          "begin_graph",
          [](StepTrace& trace, bool backward) {
            trace.addInstant({.kind = TraceEntry::Kind::BeginGraph, .backward = backward});
          },
          py::arg("backward"));
}

}  // namespace dc
