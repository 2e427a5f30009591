// A plan whose gathers start at most so many nodes before their use.
#pragma once

#include "deepcompile/plan/plan.h"

namespace dc::plan {

// `plan` with every gather at most `ahead` nodes before its first use. A gather whose uses lie further apart is split.
// Starting later never takes more memory, so a plan that fitted still fits.
Plan limitPrefetch(const StepGraph& graph, const Plan& plan, Index ahead);

}  // namespace dc::plan
