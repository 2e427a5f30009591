#include "deepcompile/plan/strategy.h"

#include "deepcompile/plan/strategies/on_demand.h"
#include "deepcompile/plan/strategies/per_block.h"
#include "deepcompile/plan/strategies/planned.h"
#include "deepcompile/plan/strategies/published.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {

std::vector<std::string_view> strategyNames() { return {"on_demand", "per_block", "published", "planned", "auto"}; }

std::unique_ptr<Strategy> makeStrategy(std::string_view name) {
  if (name == "on_demand") {
    return std::make_unique<OnDemand>();
  }
  if (name == "per_block") {
    return std::make_unique<PerBlock>();
  }
  if (name == "published") {
    return std::make_unique<Published>();
  }
  if (name == "planned") {
    return std::make_unique<Planned>();
  }
  if (name == "auto") {
    return std::make_unique<Auto>();
  }
  fail(unknown("strategy", name, strategyNames()));
}

}  // namespace dc::plan
