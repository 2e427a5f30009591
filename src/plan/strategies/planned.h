// Our own strategy: least exposed time on the simulated timeline of the whole step, under the
// budget at every point. docs/planner.md describes it.
#pragma once

#include <cstddef>
#include <vector>

#include "deepcompile/plan/strategies/schedule_search.h"
#include "deepcompile/plan/strategy.h"

namespace dc::plan {

class Planned : public Strategy {
 public:
  std::string_view name() const override { return "planned"; }
  std::string_view summary() const override { return "least exposed time of the whole step within the budget (ours)"; }
  Plan plan(const Problem& problem) const override;
};

// The plan with what it was built from. Throws BudgetError when nothing fits.
Attempt searchPlan(const Problem& problem, Trials& trials);

// The least budget for which `planned` finds a plan.
Bytes leastBudget(const Problem& problem);

// What a plan is chosen by.
struct Rating {
  Nanos step = 0;
  Bytes peak = 0;
  std::ptrdiff_t collectives = 0;
};

// Of plans whose steps are nearly as short as the shortest the one with the least memory, or nearly so with fewer
// collectives. At least one.
std::size_t bestOf(const std::vector<Rating>& ratings);

// Simulates every strategy. Of plans whose steps are nearly as short as the shortest (kWorthLessMemory) it keeps the
// one that needs the least memory, or nearly so with fewer collectives.
class Auto : public Strategy {
 public:
  std::string_view name() const override { return "auto"; }
  std::string_view summary() const override {
    return "the fastest of all strategies in simulation, or nearly so with less memory";
  }
  Plan plan(const Problem& problem) const override;
};

}  // namespace dc::plan
