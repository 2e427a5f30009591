// The Python face of the planner. It links no PyTorch: plans are made of names and numbers.
#include <functional>
#include <memory>
#include <optional>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "deepcompile/plan/command.h"
#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/models.h"
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

// (kind, node, operation, items): what a runtime executes.
py::list instructions(const PlannedStep& step) {
  py::list list;
  for (const Instruction& in : step.plan.instructions) {
    py::list items;
    for (const Item& item : step.plan.itemsOf(in)) {
      items.append(nameOf(*step.graph, item));
    }
    list.append(py::make_tuple(std::string(name(in.kind)),
                               in.node == kNone ? py::object(py::none()) : py::str(step.graph->nodes[in.node].name),
                               in.op == kNone ? py::object(py::none()) : py::int_(in.op), items));
  }
  return list;
}

py::dict byResource(const std::array<Nanos, kResources>& values) {
  py::dict dict;
  for (int r = 0; r < kResources; ++r) {
    dict[py::str(std::string(name(static_cast<Resource>(r))))] = values[r];
  }
  return dict;
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
      .def("__len__", [](const StepGraph& graph) { return graph.nodes.size(); });

  py::class_<Machine>(module, "Machine")
      .def(py::init([](const std::string& text, const std::string& file) { return parseMachine(text, file); }),
           py::arg("text"), py::arg("file") = "machine")
      .def_readonly("name", &Machine::name)
      .def_readonly("devices", &Machine::devices)
      .def_readonly("budget", &Machine::budget)
      .def_property_readonly("text", [](const Machine& machine) { return print(machine); });

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
      [](const std::vector<std::string>& arguments) {
        CommandResult result;
        {
          const py::gil_scoped_release release;
          result = runCommand(arguments);
        }
        return py::make_tuple(result.status, result.out, result.error);
      },
      py::arg("arguments"));
}

}  // namespace dc::plan
