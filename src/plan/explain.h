// Says in words, numbers and pictures why a plan is as it is.
#pragma once

#include <string>

#include "deepcompile/plan/lower_bound.h"
#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/plan.h"
#include "deepcompile/plan/simulator.h"

namespace dc::plan {

// One phrase with its seconds and bytes; empty for what the graph itself dictates.
std::string explain(const Reason& reason);

// All that is known of a plan once it has been simulated.
struct Report {
  Simulation run;
  MemoryProfile memory;
  LowerBound bound;
};
Report report(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan);

// A page of text: step time and its distance from the lower bound, what is exposed and by whom, the
// peak and who holds it, and every gather, bucket, kept parameter and offload with its reason.
// `most` limits the list of decisions.
std::string explainPlan(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                        const Report& report, std::size_t most);

// The same as a self-contained HTML page, with a picture of the timeline.
std::string explainHtml(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                        const Report& report, std::size_t most);

// The same numbers for programs.
std::string reportJson(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                       const Report& report);

// A Chrome / Perfetto trace of the simulated step: one track for each resource and a counter of
// memory.
std::string traceJson(const StepGraph& graph, const Plan& plan, const Report& report);

}  // namespace dc::plan
