// Our own strategy: least exposed time on the simulated timeline of the whole step, under the
// budget at every point. docs/planner.md describes it.
#pragma once

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

class Planned : public Strategy {
 public:
  std::string_view name() const override { return "planned"; }
  std::string_view summary() const override { return "least exposed time of the whole step within the budget (ours)"; }
  Plan plan(const Problem& problem) const override;
};

// Simulates every strategy and keeps the fastest plan; of equals, the one that needs less memory.
class Auto : public Strategy {
 public:
  std::string_view name() const override { return "auto"; }
  std::string_view summary() const override { return "the fastest of all strategies in simulation"; }
  Plan plan(const Problem& problem) const override;
};

}  // namespace dc::plan
