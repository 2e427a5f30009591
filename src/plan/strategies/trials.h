// What is known of the schedules that were tried, so that none is tried twice: many settings lead to the same schedule, and
// which they are shows only when it is built.
#pragma once

#include <unordered_map>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

// For one graph and machine; budgets may differ.
class Trials {
 public:
  // The step time that is known not to be undercut, by what a schedule is built from or by what it is; 0: nothing is known.
  Nanos& least(std::uint64_t key) { return least_[key]; }

  Effort effort;

 private:
  std::unordered_map<std::uint64_t, Nanos> least_;
};

// The same for the same schedule.
std::uint64_t keyOf(const Problem& problem, const Settings& settings, const Timeline& timeline,
                    const Overrides& overrides);
// The same for schedules that take the same time.
std::uint64_t keyOf(const Schedule& schedule);
std::uint64_t keyOf(const Timeline& timeline);

}  // namespace dc::plan
