// Record and replay: what ran, and the plan that later iterations follow.
#include "deepcompile/runtime/replay.h"

#include <array>
#include <memory>
#include <mutex>
#include <tuple>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/base/error.h"
#include "deepcompile/bindings/bindings.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/runtime.h"

namespace dc {
namespace {

namespace py = pybind11;

// (parameter, dtype, kind, in a backward, keep, launches): as Python gives and gets them.
using Key = std::pair<std::int64_t, at::ScalarType>;
using Access = std::tuple<std::int64_t, at::ScalarType, std::string, bool>;
using Read = std::tuple<Access, bool, std::vector<std::vector<Key>>>;

constexpr std::array<const char*, 8> kOpNames = {"gather",  "read",   "prefetch", "wait",
                                                 "release", "reduce", "end",      "call"};
constexpr std::array<const char*, 2> kAccessNames = {"read", "group"};

std::shared_ptr<const Graph> graphOf(std::int64_t graph_id) { return GraphTable::global().find(graph_id); }

Recorder& recorderOf(std::int64_t graph_id) { return *graphOf(graph_id)->runtime->context().recorder; }

py::tuple stopRecording(std::int64_t graph_id) {
  Recording recording;
  {
    const py::gil_scoped_release no_gil;
    recording = recorderOf(graph_id).stop();
  }
  py::list list;
  for (const RecordedOp& op : recording.ops) {
    list.append(py::make_tuple(kOpNames[static_cast<std::size_t>(op.kind)], op.id, op.dtype, op.bytes, op.backward,
                               op.iteration, op.micro, op.start, op.end));
  }
  return py::make_tuple(list, recording.ended);
}

ReplayVariant variantOf(const std::vector<Read>& reads) {
  ReplayVariant variant;
  for (const auto& [access, keep, launches] : reads) {
    const auto& [id, dtype, kind, backward] = access;
    std::size_t number = 0;
    while (number < kAccessNames.size() && kind != kAccessNames[number]) {
      ++number;
    }
    check(number < kAccessNames.size(), [&] { return concat("no read is called '", kind, "'"); });
    PlannedRead read{{{id, dtype}, static_cast<ReplayAccess::Kind>(number), backward}, keep, {}};
    for (const auto& launch : launches) {
      std::vector<ReplayKey>& keys = read.launches.emplace_back();
      for (const auto& [key_id, key_dtype] : launch) {
        keys.push_back({key_id, key_dtype});
      }
    }
    variant.push_back(std::move(read));
  }
  return variant;
}

py::list readsOf(const std::vector<ReplayAccess>& reads) {
  py::list list;
  for (const ReplayAccess& read : reads) {
    list.append(
        py::make_tuple(read.key.id, read.key.dtype, kAccessNames[static_cast<std::size_t>(read.kind)], read.backward));
  }
  return list;
}

// A Python function that C++ may call, and let go of, on any thread. What it raises becomes an Error with its words: a
// Python exception would have to pass threads without the interpreter.
ReplayFollower::Agree agreeWith(const py::function& function) {
  const std::shared_ptr<py::function> held(new py::function(function), [](py::function* gone) {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      delete gone;
    }
  });
  return [held](const std::string& difference) {
    std::string error;
    {
      const py::gil_scoped_acquire gil;
      try {
        (*held)(difference);
        return;
      } catch (const py::error_already_set& raised) {
        error = py::cast<std::string>(py::str(raised.value()));
      }
    }
    fail(error);
  };
}

std::shared_ptr<ReplayFollower> makeFollower(const std::vector<std::vector<Read>>& variants,
                                             std::unordered_set<std::int64_t> leaves,
                                             std::unordered_set<std::int64_t> persistent, const py::function& agree,
                                             std::unordered_map<std::int64_t, std::string> names) {
  std::vector<ReplayVariant> made;
  for (const auto& variant : variants) {
    made.push_back(variantOf(variant));
  }
  return std::make_shared<ReplayFollower>(std::move(made), std::move(leaves), std::move(persistent), agreeWith(agree),
                                          [names = std::move(names)](std::int64_t id) {
                                            const auto found = names.find(id);
                                            return found == names.end() ? concat("parameter ", id) : found->second;
                                          });
}

template <typename Body>
auto withGraph(std::int64_t graph_id, Body body) {
  const py::gil_scoped_release no_gil;
  const auto graph = graphOf(graph_id);
  const std::lock_guard lock(graph->runtime->context().mutex);
  check(graph->z3 != nullptr, "only graphs of ZeRO-3 can be replayed");
  return body(*graph->z3);
}

}  // namespace

void bindReplay(py::module_& module) {
  py::class_<ReplayFollower, std::shared_ptr<ReplayFollower>>(module, "ReplayFollower")
      .def(py::init(&makeFollower), py::arg("variants"), py::arg("leaves"), py::arg("persistent"), py::arg("agree"),
           py::arg("names"))
      .def(
          "add_variant",
          [](ReplayFollower& follower, const std::vector<Read>& reads) { follower.addVariant(variantOf(reads)); },
          py::arg("reads"))
      .def_property_readonly("in_cycle", &ReplayFollower::inCycle)
      .def_property_readonly("cycles", &ReplayFollower::cycles)
      .def_property_readonly("divergences", &ReplayFollower::divergences)
      .def_property_readonly("switches", &ReplayFollower::switches)
      .def_property_readonly("dropped", &ReplayFollower::dropped)
      .def("take_divergences", [](ReplayFollower& follower) {
        py::list list;
        for (const ReplayFollower::Divergence& one : follower.takeDivergences()) {
          list.append(py::make_tuple(one.difference, readsOf(one.reads)));
        }
        return list;
      });
  module.def(
      "graph_device", [](std::int64_t graph_id) { return graphOf(graph_id)->runtime->device(); }, py::arg("graph_id"));
  using NoGil = py::call_guard<py::gil_scoped_release>;  // they wait for a device
  module.def(
      "start_recording", [](std::int64_t graph_id) { recorderOf(graph_id).start(); }, py::arg("graph_id"), NoGil());
  module.def("drop_recording", [](std::int64_t graph_id) { recorderOf(graph_id).drop(); }, py::arg("graph_id"));
  module.def("stop_recording", &stopRecording, py::arg("graph_id"),
             "(kind, id, dtype, bytes, backward, iteration, micro, start, end) of each operation.");
  module.def(
      "note_call", [](std::int64_t graph_id, bool backward) { recorderOf(graph_id).call(backward); },
      py::arg("graph_id"), py::arg("backward"));
  module.def(
      "recorded_compiled", [](std::int64_t graph_id) { return recorderOf(graph_id).sawCompiled(); },
      py::arg("graph_id"));
  module.def(
      "follow",
      [](std::int64_t graph_id, std::shared_ptr<ReplayFollower> follower) {
        withGraph(graph_id, [&](Z3CustomOpExecutor& z3) { z3.follow(std::move(follower)); });
      },
      py::arg("graph_id"), py::arg("follower").none(true));
  module.def(
      "end_cycle", [](std::int64_t graph_id) { withGraph(graph_id, [](Z3CustomOpExecutor& z3) { z3.endCycle(); }); },
      py::arg("graph_id"));
  module.def(
      "reduction_order",
      [](std::int64_t graph_id) {
        return withGraph(graph_id, [](Z3CustomOpExecutor& z3) { return z3.reductionOrder(); });
      },
      py::arg("graph_id"));
  module.def(
      "plan_flushes",
      [](std::int64_t graph_id, std::vector<bool> after) {
        withGraph(graph_id, [&](Z3CustomOpExecutor& z3) { z3.planFlushes(std::move(after)); });
      },
      py::arg("graph_id"), py::arg("after"));
}

}  // namespace dc
