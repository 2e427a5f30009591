// The device memory that a plan holds after each of its instructions. It follows from the order
// alone (plan.h).
#pragma once

#include <string>
#include <vector>

#include "deepcompile/plan/plan.h"
#include "deepcompile/plan/usage.h"

namespace dc::plan {

struct MemoryProfile {
  std::vector<Bytes> at;  // while each instruction is in effect
  Bytes peak = 0;
  Index peak_at = kNone;  // the first instruction that reaches it
};

MemoryProfile memoryProfile(const StepGraph& graph, const Usage& usage, const Plan& plan);

struct Holder {
  std::string what;
  Bytes bytes = 0;
};

// Who holds the memory while instruction `at` is in effect, largest first: totals by kind and the
// largest single things.
std::vector<Holder> holders(const StepGraph& graph, const Usage& usage, const Plan& plan, Index at);

}  // namespace dc::plan
