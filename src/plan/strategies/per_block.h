// Prefetch of one: while a block computes, the next block's parameters are gathered as one
// collective (FSDP's rule).
#pragma once

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

class PerBlock : public Strategy {
 public:
  std::string_view name() const override { return "per_block"; }
  std::string_view summary() const override { return "gather the next block while this one computes"; }
  Plan plan(const Problem& problem) const override;
};

}  // namespace dc::plan
