// A step cut into windows, for the lower bound: what each must gather and reduce while it runs, and what
// memory can hold when it begins.
#pragma once

#include <vector>

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/usage.h"

namespace dc::plan {

// A pass of a micro-batch: a run of slots of one phase. What it uses must be gathered while it
// runs, except what memory holds when it begins; what it contributes must be reduced while it runs,
// except what memory holds when it ends.
struct Window {
  Nanos compute = 0;
  Bytes needed = 0;       // parameters that it uses, each once
  Bytes reduced = 0;      // gradients that it completes
  Bytes room = 0;         // beside the slot before it: for what is gathered and what is not reduced
  Bytes first_room = 0;   // beside its first slot: for what is gathered
  Bytes activations = 0;  // live in these two slots at most
  Bytes fresh = 0;        // gradients that the slot before it made itself, not part of the room
  Nanos after_last = 0;   // compute that follows the last gather that it needs
  Nanos update_rest = 0;  // the reduction of what the slot before it made, and the updates after that
  bool update = false;    // of the optimizer
};

// A way to cut the step into windows.
struct Cut {
  std::vector<Window> windows;
  Index spans = 1;  // beginnings of windows that one buffer lives across at most
};

// The gradients that `slot` completes are reduced after it, and the nodes from their update on follow, up
// to the slot before `end`: the least time that this takes.
Nanos reduceAndUpdate(const StepGraph& graph, const Usage& usage, const CostModel& cost, Index slot, Index end);

// With `turn`, the first slot of each backward pass is a window of its own, of which only the compute
// counts: memory is often fullest there (logits and the largest gradient), and a gather that runs
// beside it needs room beside it. Both ways of cutting the step give a bound.
Cut windowsOf(const StepGraph& graph, const Usage& usage, const CostModel& cost, Bytes budget, bool turn);

}  // namespace dc::plan
