// The text form of a step graph: what tests, bug reports and people write. docs/planner.md
// describes it.
#pragma once

#include <string>
#include <string_view>

#include "deepcompile/plan/graph.h"

namespace dc::plan {

// Throws ParseError (with line and column) for what is malformed and Error for what is not a step
// (a cycle, ...).
StepGraph parseGraph(std::string_view text, const std::string& file = "graph");

// parseGraph(print(g)) == g for every validated graph.
std::string print(const StepGraph& graph);

}  // namespace dc::plan
