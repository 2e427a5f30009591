// Eager ZeRO-3: each node's parameters are gathered right before it and released right after it.
#pragma once

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

class OnDemand : public Strategy {
 public:
  std::string_view name() const override { return "on_demand"; }
  std::string_view summary() const override { return "gather before each use, release after it (eager ZeRO-3)"; }
  Plan plan(const Problem& problem) const override;
};

}  // namespace dc::plan
