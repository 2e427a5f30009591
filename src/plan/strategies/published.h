// The published DeepCompile rule, as described in its paper and sources: walk each graph backwards
// and hoist gathers until memory is full, fuse small ones, then unshard greedily; offload optimizer
// states first in, first out instead of prefetching when memory is short.
#pragma once

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

class Published : public Strategy {
 public:
  std::string_view name() const override { return "published"; }
  std::string_view summary() const override { return "hoist gathers until memory is full (DeepCompile)"; }
  Plan plan(const Problem& problem) const override;
};

}  // namespace dc::plan
