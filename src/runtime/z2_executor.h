// ZeRO-2: gradients are sharded too. Each backward reduces them to their owners; no rank keeps more than its slices.
#pragma once

#include "deepcompile/runtime/executor.h"

namespace dc {

class Z2CustomOpExecutor : public CustomOpExecutor {
 public:
  using CustomOpExecutor::CustomOpExecutor;
  const char* stageName() const override { return "ZeRO-2"; }

 protected:
  // Each rank needs only its own slice of the mean: half the bytes of an all-reduce.
  void flushReduceBucket(at::ScalarType scalar_type) override { reducer().reduceToOwners(scalar_type); }
  bool sendsTasksOneByOne() const override { return true; }
};

}  // namespace dc
