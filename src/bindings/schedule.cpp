// The schedules that steps follow.
#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/base/error.h"
#include "deepcompile/bindings/bindings.h"
#include "deepcompile/runtime/follower.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/runtime.h"

namespace dc {
namespace {

namespace py = pybind11;

// As Python gives and gets them: the copy of a parameter; (parameter, dtype, kind, in a backward); the event, whether
// its copy stays, gathers, and the states that leave, go and return.
using Key = std::pair<std::int64_t, at::ScalarType>;
using EventTuple = std::tuple<std::int64_t, at::ScalarType, std::string, bool>;
using Moves = std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>>;
using Scheduled = std::tuple<EventTuple, bool, std::vector<std::vector<Key>>, Moves>;

constexpr std::array<const char*, 3> kEventNames = {"read", "group", "graph"};

std::shared_ptr<const Graph> graphOf(std::int64_t graph_id) { return GraphTable::global().find(graph_id); }

// Python's; the runtime shares what it holds.
struct HeldSchedule {
  std::shared_ptr<const StepSchedule> schedule;
  std::int64_t params;  // that its numbers stand for

  explicit HeldSchedule(StepSchedule made) : params(0) {
    for (const ScheduledEvent& event : made) {
      params = std::max(params, event.event.key.id + 1);
      for (const auto& together : event.gathers) {
        for (const CopyKey& key : together) {
          params = std::max(params, key.id + 1);
        }
      }
    }
    schedule = std::make_shared<const StepSchedule>(std::move(made));
  }
};

StepSchedule scheduleOf(const std::vector<Scheduled>& events) {
  StepSchedule schedule;
  schedule.reserve(events.size());
  for (const auto& [event, keep, gathers, moves] : events) {
    const auto& [id, dtype, kind, backward] = event;
    const auto name = std::find(kEventNames.begin(), kEventNames.end(), kind);
    check(name != kEventNames.end(), [&] { return concat("no event is called '", kind, "'"); });
    const auto number = static_cast<ProgramEvent::Kind>(name - kEventNames.begin());
    ScheduledEvent& made = schedule.emplace_back();
    made.event = {{id, dtype}, number, backward};
    made.keep = keep;
    std::tie(made.moves.leave, made.moves.free, made.moves.fetch) = moves;
    for (const auto& together : gathers) {
      std::vector<CopyKey>& keys = made.gathers.emplace_back();
      for (const auto& [key_id, key_dtype] : together) {
        keys.push_back({key_id, key_dtype});
      }
    }
  }
  return schedule;
}

py::list tuplesOf(const std::vector<ProgramEvent>& events) {
  py::list list;
  for (const ProgramEvent& event : events) {
    list.append(py::make_tuple(event.key.id, event.key.dtype, kEventNames[static_cast<std::size_t>(event.kind)],
                               event.backward));
  }
  return list;
}

// A Python function that C++ may call, and let go of, on any thread. What it raises becomes an Error with its words: a
// Python exception would have to pass threads without the interpreter.
ScheduleFollower::Agree agreeWith(const py::function& function) {
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

std::shared_ptr<ScheduleFollower> makeFollower(const std::vector<std::vector<Scheduled>>& schedules,
                                               std::unordered_set<std::int64_t> leaves,
                                               std::unordered_set<std::int64_t> persistent, const py::function& agree,
                                               std::unordered_map<std::int64_t, std::string> names) {
  std::vector<StepSchedule> made;
  for (const auto& schedule : schedules) {
    made.push_back(scheduleOf(schedule));
  }
  return std::make_shared<ScheduleFollower>(std::move(made), std::move(leaves), std::move(persistent), agreeWith(agree),
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
  check(graph->z3 != nullptr, "only graphs of ZeRO-3 follow a schedule");
  if constexpr (std::is_invocable_v<Body, Z3CustomOpExecutor&, Runtime&>) {
    return body(*graph->z3, *graph->runtime);
  } else {
    return body(*graph->z3);
  }
}

}  // namespace

void bindSchedule(py::module_& module) {
  py::class_<HeldSchedule>(module, "StepSchedule")
      .def(py::init([](const std::vector<Scheduled>& events) { return HeldSchedule(scheduleOf(events)); }),
           py::arg("events"))
      .def("__len__", [](const HeldSchedule& held) { return held.schedule->size(); });
  py::class_<ScheduleFollower, std::shared_ptr<ScheduleFollower>>(module, "ScheduleFollower")
      .def(py::init(&makeFollower), py::arg("schedules"), py::arg("leaves"), py::arg("persistent"), py::arg("agree"),
           py::arg("names"))
      .def(
          "add_schedule",
          [](ScheduleFollower& follower, const std::vector<Scheduled>& events) {
            follower.addSchedule(scheduleOf(events));
          },
          py::arg("events"))
      .def_property_readonly("in_cycle", &ScheduleFollower::inCycle)
      .def_property_readonly("cycles", &ScheduleFollower::cycles)
      .def_property_readonly("divergences", &ScheduleFollower::divergences)
      .def_property_readonly("switches", &ScheduleFollower::switches)
      .def_property_readonly("dropped", &ScheduleFollower::dropped)
      .def("take_divergences", [](ScheduleFollower& follower) {
        py::list list;
        for (const ScheduleFollower::Divergence& one : follower.takeDivergences()) {
          list.append(py::make_tuple(one.difference, tuplesOf(one.events)));
        }
        return list;
      });
  module.def(
      "graph_device", [](std::int64_t graph_id) { return graphOf(graph_id)->runtime->device(); }, py::arg("graph_id"));
  module.def(
      "begin_graph",
      [](std::int64_t graph_id, const HeldSchedule* held, const std::vector<at::Tensor>& shards) {
        check(held == nullptr || held->params <= static_cast<std::int64_t>(shards.size()), [&] {
          return concat("begin_graph: a schedule of ", held->params, " parameters for ", shards.size(),
                        " shards (graph ", graph_id, ")");
        });
        withGraph(graph_id, [&](Z3CustomOpExecutor& z3, Runtime& runtime) {
          std::vector<std::int64_t> ids;
          ids.reserve(shards.size());
          for (const at::Tensor& shard : shards) {
            ids.push_back(runtime.registry().idOf(shard));
          }
          z3.gatherer().beginGraph(held == nullptr ? nullptr : held->schedule, std::move(ids), runtime.states());
        });
      },
      py::arg("graph_id"), py::arg("schedule").none(true), py::arg("shards"),
      "A compiled graph begins to run; its reads follow the schedule.");
  module.def(
      "follow",
      [](std::int64_t graph_id, std::shared_ptr<ScheduleFollower> follower) {
        withGraph(graph_id, [&](Z3CustomOpExecutor& z3) { z3.gatherer().follow(std::move(follower)); });
      },
      py::arg("graph_id"), py::arg("follower").none(true));
  module.def(
      "end_cycle",
      [](std::int64_t graph_id) { withGraph(graph_id, [](Z3CustomOpExecutor& z3) { z3.gatherer().endCycle(); }); },
      py::arg("graph_id"));
}

}  // namespace dc
