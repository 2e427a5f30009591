// ZeRO-1: optimizer states are sharded. Gradients add up on each rank and travel only in the backward before an update.
#pragma once

#include <unordered_map>

#include "deepcompile/runtime/executor.h"

namespace dc {

class Z1CustomOpExecutor : public CustomOpExecutor {
 public:
  using CustomOpExecutor::CustomOpExecutor;
  const char* stageName() const override { return "ZeRO-1"; }

 protected:
  // Each rank needs only its own slice of the mean, so a reduction to owners serves: half the bytes of an all-reduce.
  void flushReduceBucket(at::ScalarType scalar_type) override { reduceToOwners(scalar_type); }
  bool communicates() const override { return param_updated_; }
  void accumulateLocally(const DSParam& param, const at::Tensor& grad) override;
  at::Tensor withLocal(const DSParam& param, at::Tensor grad) override;

 private:
  struct Local {
    at::Tensor sum;      // the whole gradient, in the dtype of the gradient buffer; kept for the next accumulation
    bool holds = false;  // something was added since the last update
  };
  std::unordered_map<std::int64_t, Local> local_;
};

}  // namespace dc
