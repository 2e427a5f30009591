// The ways of planning a step, each behind the same interface.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/schedule.h"
#include "deepcompile/plan/simulator.h"

namespace dc::plan {

// No plan of this strategy fits. `least` would do.
class BudgetError : public Error {
 public:
  BudgetError(const std::string& what, Bytes least) : Error(what), least(least) {}
  Bytes least;
};

class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string_view name() const = 0;
  // One line on what it does.
  virtual std::string_view summary() const = 0;
  // A plan within the budget, or a BudgetError. Same problem, same plan.
  virtual Plan plan(const Problem& problem) const = 0;
};

// on_demand, per_block, published, planned, auto. An unknown name is an error that names the
// nearest.
std::unique_ptr<Strategy> makeStrategy(std::string_view name);
std::vector<std::string_view> strategyNames();

}  // namespace dc::plan
