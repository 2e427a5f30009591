// Runs a plan on a described machine: discrete events over the five resources (docs/simulator.md).
#pragma once

#include <array>
#include <limits>
#include <vector>

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/plan.h"

namespace dc::plan {

inline constexpr Nanos kNoLimit = std::numeric_limits<Nanos>::max();

struct Simulation {
  Nanos step = 0;            // from the first launch to the end of the last operation
  bool complete = true;      // if not, the step takes at least so long, and nothing else is known
  std::size_t events = 0;    // that were simulated
  std::vector<Nanos> start;  // of each instruction; for a wait: when the compute stream reached it
  std::vector<Nanos> end;
  std::vector<Nanos> stall;                 // operation -> time the compute stream stood still for it
  std::array<Nanos, kResources> busy{};     // time in which each resource worked
  std::array<Nanos, kResources> exposed{};  // stall by the resource that was waited for
  Nanos host_bound = 0;                     // time the compute stream waited for launches
};

// Stops, incomplete, as soon as the step is sure to take `limit` or longer.
Simulation simulate(const StepGraph& graph, const CostModel& cost, const Plan& plan, Nanos limit = kNoLimit);

// The duration of a collective or copy when nothing else runs.
Nanos durationOf(const StepGraph& graph, const CostModel& cost, const Plan& plan, const Instruction& instruction);

}  // namespace dc::plan
