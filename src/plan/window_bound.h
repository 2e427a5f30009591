// The lower bound that goes window by window: memory limits what a window finds gathered and what it may
// leave to be reduced, the host link limits what can be away to make room.
#pragma once

#include "deepcompile/plan/step_windows.h"

namespace dc::plan {

struct WindowBound {
  Nanos step = 0;
  Nanos gathers = 0;  // of all windows together
};

// The shortest step from `known` on that is not refuted; shorter ones are known to be impossible.
// `reductions`: the least time of all reductions of the step.
WindowBound windowBound(const StepGraph& graph, const CostModel& cost, const Cut& cut, Nanos reductions, Nanos known);

}  // namespace dc::plan
