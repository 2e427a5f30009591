// ZeRO-1: optimizer states are sharded. Gradients add up on each rank and travel only in the backward before an update.
#pragma once

#include <utility>

#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/local_gradients.h"

namespace dc {

class Z1CustomOpExecutor : public CustomOpExecutor {
 public:
  using CustomOpExecutor::CustomOpExecutor;
  const char* stageName() const override { return "ZeRO-1"; }

 protected:
  // Each rank needs only its own slice of the mean, so a reduction to owners serves: half the bytes of an all-reduce.
  void flushReduceBucket(at::ScalarType scalar_type) override { reduceToOwners(scalar_type); }
  bool sendsTasksOneByOne() const override { return true; }
  bool communicates() const override { return param_updated_; }
  void accumulateLocally(const DSParam& param, const at::Tensor& grad) override { local_.add(param, grad); }
  at::Tensor withLocal(const DSParam& param, at::Tensor grad) override { return local_.take(param, std::move(grad)); }
  void discardLocal(std::int64_t ds_id) override { local_.discard(ds_id); }

 private:
  LocalGradients local_;
};

}  // namespace dc
