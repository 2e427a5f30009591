// Of plans that take about the same time, the one that needs the least memory.
#pragma once

#include "deepcompile/plan/strategies/schedule_search.h"

namespace dc::plan {

// By how much longer than the fastest a step may become to need less memory, in thousandths.
inline constexpr int kWorthLessMemory = 10;

// Looks for plans like `found`, made for the same problem, that stay within less memory and whose step takes no longer
// than `limit`. Returns the one with the least peak, `found` itself where there is none.
Plan leaner(const Problem& problem, const Attempt& found, Nanos limit, Trials& trials);

}  // namespace dc::plan
