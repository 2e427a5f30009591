// The Python face of the planner. It links no PyTorch: plans are made of names and numbers.
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "deepcompile/plan/command.h"
#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/graph_builder.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/models.h"
#include "deepcompile/plan/prefetch_limit.h"
#include "deepcompile/plan/strategies/planned.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/verifier.h"

namespace py = pybind11;

namespace dc::plan {
namespace {

// A plan with all that it was made from, so that it can be explained and simulated at any time.
struct PlannedStep {
  std::shared_ptr<const StepGraph> graph;
  std::shared_ptr<const Usage> usage;
  std::shared_ptr<const CostModel> cost;
  Plan plan;
  Report made;
};

PlannedStep finish(std::shared_ptr<const StepGraph> graph, const Machine& machine, Bytes budget,
                   const std::function<Plan(const Problem&)>& make) {
  PlannedStep step;
  step.graph = std::move(graph);
  step.usage = std::make_shared<Usage>(*step.graph);
  step.cost = std::make_shared<CostModel>(machine, step.graph->world);
  step.plan = make({*step.graph, *step.usage, *step.cost, budget});
  requireValid(*step.graph, step.plan);
  step.made = report(*step.graph, *step.usage, *step.cost, step.plan);
  return step;
}

PlannedStep planStep(std::shared_ptr<const StepGraph> graph, const Machine& machine, std::optional<Bytes> budget,
                     const std::string& strategy) {
  const py::gil_scoped_release release;
  return finish(std::move(graph), machine, budget.value_or(machine.budget),
                [&](const Problem& problem) { return makeStrategy(strategy)->plan(problem); });
}

PlannedStep loadPlan(std::shared_ptr<const StepGraph> graph, const Machine& machine, const std::string& text) {
  const py::gil_scoped_release release;
  Plan plan = parsePlan(text, *graph);
  const Bytes budget = plan.budget;
  return finish(std::move(graph), machine, budget, [&](const Problem&) { return std::move(plan); });
}

PlannedStep limitedPrefetch(const PlannedStep& step, Index ahead) {
  const py::gil_scoped_release release;
  Plan plan = limitPrefetch(*step.graph, step.plan, ahead);
  return finish(step.graph, step.cost->machine(), step.plan.budget, [&](const Problem&) { return std::move(plan); });
}

py::object orNone(Index index) { return index == kNone ? py::object(py::none()) : py::int_(index); }

// (kind, node, operation, items): what a runtime executes. A node is its place in the graph, an item (kind, index).
py::tuple instructions(const PlannedStep& step) {
  std::map<std::string_view, py::str> words;
  const auto word = [&](std::string_view text) { return words.try_emplace(text, text).first->second; };
  py::tuple all(step.plan.instructions.size());
  for (std::size_t i = 0; i < step.plan.instructions.size(); ++i) {
    const Instruction& in = step.plan.instructions[i];
    py::tuple items(in.count);
    for (Index item = 0; item < in.count; ++item) {
      const auto& [kind, id] = step.plan.itemsOf(in)[item];
      items[item] = py::make_tuple(word(name(kind)), id);
    }
    all[i] = py::make_tuple(word(name(in.kind)), orNone(in.node), orNone(in.op), std::move(items));
  }
  return all;
}

template <typename Things>
std::vector<std::string> namesOf(const Things& things) {
  std::vector<std::string> names;
  for (const auto& thing : things) {
    names.push_back(thing.name);
  }
  return names;
}

template <typename T>
T known(std::optional<T> value, const char* what, const std::string& text) {
  check(value.has_value(), [&] { return concat("'", text, "' is no ", what); });
  return *value;
}

py::dict byResource(const std::array<Nanos, kResources>& values) {
  py::dict dict;
  for (int r = 0; r < kResources; ++r) {
    dict[py::str(std::string(name(static_cast<Resource>(r))))] = values[r];
  }
  return dict;
}

using Curve = std::vector<std::pair<Bytes, Nanos>>;

Curve pairsOf(const std::vector<Point>& points) {
  Curve pairs;
  for (const Point& point : points) {
    pairs.emplace_back(point.bytes, point.time);
  }
  return pairs;
}

std::vector<Point> pointsOf(const Curve& pairs) {
  std::vector<Point> points;
  for (const auto& [bytes, time] : pairs) {
    points.push_back({bytes, time});
  }
  return points;
}

// The machine with what is given in place of what it has. `inside`: latency in nanoseconds, bytes per second.
Machine replaced(Machine machine, std::optional<std::string> called, std::optional<int> devices,
                 std::optional<int> slowdown, std::optional<std::pair<Nanos, std::int64_t>> inside,
                 std::optional<std::string> offloads, std::optional<Curve> gather, std::optional<Curve> reduce) {
  machine.name = called.value_or(machine.name);
  machine.devices = devices.value_or(machine.devices);
  machine.slowdown = slowdown.value_or(machine.slowdown);
  if (inside) {
    machine.inside = {inside->first, inside->second};
  }
  if (offloads) {
    machine.offload = known(offload(*offloads), "kind of offload (no, states, yes)", *offloads);
  }
  if (gather) {
    machine.gather = pointsOf(*gather);
  }
  if (reduce) {
    machine.reduce = pointsOf(*reduce);
  }
  validate(machine);
  return machine;
}

// Times and sizes are keywords: each argument of these calls is a number of nanoseconds, of bytes, or an index.
void defineGraphBuilder(py::module_& module) {
  py::class_<StepGraphBuilder>(module, "StepGraphBuilder")
      .def(py::init<std::string, int, int>(), py::arg("name"), py::kw_only(), py::arg("world"), py::arg("stage") = 3)
      .def(
          "param",
          [](StepGraphBuilder& builder, std::string called, Bytes bytes, Bytes shard, Bytes grad, Bytes accum,
             Bytes state, bool persistent, bool frozen) {
            return builder.add(Param{.name = std::move(called),
                                     .bytes = bytes,
                                     .shard = shard,
                                     .grad = grad,
                                     .accum = accum,
                                     .state = state,
                                     .persistent = persistent,
                                     .frozen = frozen});
          },
          py::arg("name"), py::kw_only(), py::arg("bytes"), py::arg("shard"), py::arg("grad") = 0, py::arg("accum") = 0,
          py::arg("state") = 0, py::arg("persistent") = false, py::arg("frozen") = false)
      .def(
          "buffer",
          [](StepGraphBuilder& builder, std::string called, Bytes bytes, bool gradient) {
            return builder.add(Buffer{.name = std::move(called), .bytes = bytes, .gradient = gradient});
          },
          py::arg("name"), py::kw_only(), py::arg("bytes"), py::arg("gradient") = false)
      .def(
          "node",
          [](StepGraphBuilder& builder, std::string called, const std::string& in, Nanos time, Index block, Index micro,
             Bytes workspace, std::vector<Index> uses, std::vector<Index> grads, std::vector<Index> updates,
             std::vector<Index> makes, std::vector<Index> reads) {
            const Phase part = known(phase(in), "phase (forward, backward, update)", in);
            return builder.add(Node{.name = std::move(called),
                                    .kind = part == Phase::Update ? NodeKind::Optimizer : NodeKind::Compute,
                                    .phase = part,
                                    .micro = micro,
                                    .block = block,
                                    .time = time,
                                    .workspace = workspace,
                                    .uses = std::move(uses),
                                    .grads = std::move(grads),
                                    .updates = std::move(updates),
                                    .makes = std::move(makes),
                                    .reads = std::move(reads)});
          },
          py::arg("name"), py::kw_only(), py::arg("phase"), py::arg("time"), py::arg("block") = 0, py::arg("micro") = 0,
          py::arg("workspace") = 0, py::arg("uses") = std::vector<Index>(), py::arg("grads") = std::vector<Index>(),
          py::arg("updates") = std::vector<Index>(), py::arg("makes") = std::vector<Index>(),
          py::arg("reads") = std::vector<Index>())
      .def("build", [](StepGraphBuilder& builder) { return std::make_shared<StepGraph>(builder.build()); });
}

}  // namespace

PYBIND11_MODULE(_plan, module) {
  module.doc() = "The planner: step graphs, machines, plans, proofs and simulations.";
  // Local: the same C++ errors mean something else in the other module.
  const auto& plan_error = py::register_local_exception<Error>(module, "PlanError", PyExc_ValueError);
  py::register_local_exception<BudgetError>(module, "BudgetError", plan_error.ptr());

  py::class_<StepGraph, std::shared_ptr<StepGraph>>(module, "StepGraph")
      .def(py::init([](const std::string& text, const std::string& file) {
             return std::make_shared<StepGraph>(parseGraph(text, file));
           }),
           py::arg("text"), py::arg("file") = "graph")
      .def_readonly("name", &StepGraph::name)
      .def_readonly("world", &StepGraph::world)
      .def_readonly("stage", &StepGraph::stage)
      .def_property_readonly("text", [](const StepGraph& graph) { return print(graph); })
      .def_property_readonly("hash", [](const StepGraph& graph) { return hashOf(graph); })
      .def_property_readonly("params", [](const StepGraph& graph) { return namesOf(graph.params); })
      .def_property_readonly("buffers", [](const StepGraph& graph) { return namesOf(graph.buffers); })
      .def_property_readonly("nodes", [](const StepGraph& graph) { return namesOf(graph.nodes); })
      .def("__len__", [](const StepGraph& graph) { return graph.nodes.size(); });

  defineGraphBuilder(module);

  py::class_<Machine>(module, "Machine")
      .def(py::init([](const std::string& text, const std::string& file) { return parseMachine(text, file); }),
           py::arg("text"), py::arg("file") = "machine")
      .def_readonly("name", &Machine::name)
      .def_readonly("devices", &Machine::devices)
      .def_readonly("budget", &Machine::budget)
      .def_property_readonly("text", [](const Machine& machine) { return print(machine); })
      .def_property_readonly("gather", [](const Machine& machine) { return pairsOf(machine.gather); })
      .def_property_readonly("reduce", [](const Machine& machine) { return pairsOf(machine.reduce); })
      .def("replace", &replaced, py::kw_only(), py::arg("name") = py::none(), py::arg("devices") = py::none(),
           py::arg("slowdown") = py::none(), py::arg("inside") = py::none(), py::arg("offload") = py::none(),
           py::arg("gather") = py::none(), py::arg("reduce") = py::none());

  py::class_<PlannedStep>(module, "Plan")
      .def_property_readonly("strategy", [](const PlannedStep& step) { return step.plan.strategy; })
      .def_property_readonly("hash", [](const PlannedStep& step) { return hashOf(step.plan); })
      .def_property_readonly("text", [](const PlannedStep& step) { return print(*step.graph, step.plan); })
      .def_property_readonly("budget", [](const PlannedStep& step) { return step.plan.budget; })
      .def_property_readonly("step_ns", [](const PlannedStep& step) { return step.made.run.step; })
      .def_property_readonly("lower_bound_ns", [](const PlannedStep& step) { return step.made.bound.best; })
      .def_property_readonly("peak_bytes", [](const PlannedStep& step) { return step.made.memory.peak; })
      .def_property_readonly("exposed_ns", [](const PlannedStep& step) { return byResource(step.made.run.exposed); })
      .def_property_readonly("busy_ns", [](const PlannedStep& step) { return byResource(step.made.run.busy); })
      .def_property_readonly("effort",
                             [](const PlannedStep& step) {
                               const Effort& effort = step.plan.effort;
                               py::dict dict;
                               dict["builds"] = effort.builds;
                               dict["memory"] = effort.memory;
                               dict["simulations"] = effort.simulations;
                               dict["events"] = effort.events;
                               return dict;
                             })
      .def_property_readonly("graph", [](const PlannedStep& step) { return step.graph; })
      .def_property_readonly("instructions", &instructions)
      .def(
          "explain",
          [](const PlannedStep& step, std::size_t most) {
            return explainPlan(*step.graph, *step.usage, *step.cost, step.plan, step.made, most);
          },
          py::arg("most") = 40)
      .def("trace", [](const PlannedStep& step) { return traceJson(*step.graph, step.plan, step.made); })
      .def("json", [](const PlannedStep& step) {
        return reportJson(*step.graph, *step.usage, *step.cost, step.plan, step.made);
      });

  module.def("preset", &preset, py::arg("name"));
  module.def("preset_names", &presetNames);
  module.def("model_names", &modelNames);
  module.def("strategy_names", &strategyNames);
  module.def(
      "make_model",
      [](const std::string& model, const Machine& machine, int world, int batch, int sequence, int accumulate,
         int stage, bool checkpoint, bool host_optimizer) {
        ModelOptions options;
        options.world = world;
        options.batch = batch;
        options.sequence = sequence;
        options.accumulate = accumulate;
        options.stage = stage;
        options.checkpoint = checkpoint;
        options.host_optimizer = host_optimizer;
        return std::make_shared<StepGraph>(makeModel(model, options, machine));
      },
      py::arg("model"), py::arg("machine"), py::kw_only(), py::arg("world") = 8, py::arg("batch") = 1,
      py::arg("sequence") = 1024, py::arg("accumulate") = 1, py::arg("stage") = 3, py::arg("checkpoint") = true,
      py::arg("host_optimizer") = false);
  module.def("plan", &planStep, py::arg("graph"), py::arg("machine"), py::arg("budget") = py::none(),
             py::arg("strategy") = "auto");
  module.def(
      "least_budget",
      [](const StepGraph& graph, const Machine& machine) {
        const py::gil_scoped_release release;
        const Usage usage(graph);
        const CostModel cost(machine, graph.world);
        return leastBudget({graph, usage, cost, 0});
      },
      py::arg("graph"), py::arg("machine"));
  module.def("limit_prefetch", &limitedPrefetch, py::arg("plan"), py::arg("ahead"));
  module.def("load_plan", &loadPlan, py::arg("graph"), py::arg("machine"), py::arg("text"));
  module.def(
      "verify",
      [](const StepGraph& graph, const std::string& text) -> py::object {
        if (const auto violation = verify(graph, parsePlan(text, graph))) {
          return py::make_tuple(std::string(name(violation->property)), violation->instruction, violation->reason);
        }
        return py::none();
      },
      py::arg("graph"), py::arg("plan_text"));
  module.def(
      "command",
      [](const std::vector<std::string>& arguments, const std::string& program) {
        CommandResult result;
        {
          const py::gil_scoped_release release;
          result = runCommand(arguments, program);
        }
        return py::make_tuple(result.status, result.out, result.error);
      },
      py::arg("arguments"), py::arg("program"));
}

}  // namespace dc::plan
