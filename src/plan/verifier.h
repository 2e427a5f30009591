// Proves a plan before it runs. The verifier shares nothing with the planner but the graph and the
// plan: it keeps its own books, so that a mistake in the planner cannot hide itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "deepcompile/plan/plan.h"

namespace dc::plan {

enum class Property : std::uint8_t {
  WellFormed,         // every number refers to something that exists
  EveryNodeOnce,      // each node of the graph runs exactly once
  DependenciesFirst,  // after all that it needs: nothing is cyclic
  GatheredBeforeUse,
  WaitedBeforeRead,
  KeptUntilLastUse,     // not released while still used
  AliasesRespected,     // the same, for a use through a view
  NeverStale,           // no gathered copy survives the update of its parameter
  PersistentOnce,       // a persistent parameter is gathered at most once
  ReducedOnce,          // every gradient exactly once, in its micro-batch (ZeRO-1: once a step)
  ReducedBeforeUpdate,  // and waited for before its optimizer
  OnDeviceWhenUsed,     // states, shards and buffers are back before they are needed
  CopiedBeforeDropped,  // memory is given back only after its copy is complete
  SteadyState,          // a step ends as it began
  WithinBudget,
  SameOnAllRanks,
};
std::string_view name(Property property);

struct Violation {
  Property property = Property::WellFormed;
  Index instruction = kNone;
  std::string reason;  // names the node or parameter
};

// The first violation, or nothing: then the plan is safe at any speed of any resource.
std::optional<Violation> verify(const StepGraph& graph, const Plan& plan);

// Ranks that start different collectives, or the same in another order, hang. `plans` holds one
// plan for each rank.
std::optional<Violation> verifyRanks(const StepGraph& graph, const std::vector<Plan>& plans);

// Throws an Error that carries the violation.
void requireValid(const StepGraph& graph, const Plan& plan);

}  // namespace dc::plan
