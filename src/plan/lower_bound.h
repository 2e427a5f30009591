// What no plan can beat. Every bound here holds for every plan that the verifier accepts under the
// budget.
#pragma once

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/usage.h"

namespace dc::plan {

struct LowerBound {
  Nanos compute = 0;  // all nodes one after the other, and what collectives slow them down at least
  Nanos gathers = 0;  // the least that must be gathered when memory is used as well as possible
  Nanos reductions = 0;
  Nanos links = 0;     // both, where they share the links
  Nanos windows = 0;   // pass by pass, the larger of compute and what must be communicated during the pass
  Nanos critical = 0;  // what must be gathered before a node, the nodes after it, the reductions at the end
  Nanos launches = 0;  // the host
  Nanos best = 0;      // the largest of them
};

LowerBound lowerBound(const StepGraph& graph, const Usage& usage, const CostModel& cost, Bytes budget);

}  // namespace dc::plan
