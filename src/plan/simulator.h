// Runs a plan on a described machine: discrete events over the five resources (docs/simulator.md).
#pragma once

#include <array>
#include <vector>

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/plan.h"

namespace dc::plan {

struct Simulation {
  Nanos step = 0;            // from the first launch to the end of the last operation
  std::vector<Nanos> start;  // of each instruction; for a wait: when the compute stream reached it
  std::vector<Nanos> end;
  std::vector<Nanos> stall;                 // operation -> time the compute stream stood still for it
  std::array<Nanos, kResources> busy{};     // time in which each resource worked
  std::array<Nanos, kResources> exposed{};  // stall by the resource that was waited for
  Nanos host_bound = 0;                     // time the compute stream waited for launches
};

Simulation simulate(const StepGraph& graph, const CostModel& cost, const Plan& plan);

// The duration of a collective or copy when nothing else runs.
Nanos durationOf(const StepGraph& graph, const CostModel& cost, const Plan& plan, const Instruction& instruction);

}  // namespace dc::plan
