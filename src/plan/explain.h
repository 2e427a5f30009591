// Says in words why a plan is as it is.
#pragma once

#include <string>

#include "deepcompile/plan/plan.h"

namespace dc::plan {

// One phrase with its seconds and bytes; empty for what the graph itself dictates.
std::string explain(const Reason& reason);

}  // namespace dc::plan
