// What is known of the schedules that were tried, so that none is tried twice: many settings lead to the same schedule,
// and which they are shows only when it is built.
#pragma once

#include <unordered_map>
#include <vector>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

// For one graph and machine; budgets may differ.
class Trials {
 public:
  // A step time that no schedule built from this can undercut; 0: nothing is known.
  Nanos least(std::uint64_t inputs, const Settings& settings) const;
  void add(std::uint64_t inputs, const Leeway& leeway, Nanos least) { built_[inputs].push_back({leeway, least}); }

  // The same for a schedule, by its key.
  Nanos& least(std::uint64_t schedule) { return least_[schedule]; }

  Effort effort;

 private:
  struct Built {
    Leeway leeway;
    Nanos least;
  };
  std::unordered_map<std::uint64_t, std::vector<Built>> built_;
  std::unordered_map<std::uint64_t, Nanos> least_;
};

// Of all that a schedule is built from, but for the settings that have leeway.
std::uint64_t inputsOf(const Problem& problem, const Settings& settings, const Timeline& timeline,
                       const Overrides& overrides);
// The same for schedules that take the same time.
std::uint64_t keyOf(const Schedule& schedule);
std::uint64_t keyOf(const Timeline& timeline);

}  // namespace dc::plan
