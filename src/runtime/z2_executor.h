// ZeRO-2: gradients are sharded too. Each backward reduces them to their owners; no rank keeps more than its slices.
#pragma once

#include "deepcompile/runtime/executor.h"

namespace dc {

class Z2CustomOpExecutor : public CustomOpExecutor {
 public:
  using CustomOpExecutor::CustomOpExecutor;
  const char* stageName() const override { return "ZeRO-2"; }

 protected:
  void flushReduceBucket(at::ScalarType scalar_type) override { reduceToOwners(scalar_type); }
  bool sendsTasksOneByOne() const override { return true; }
};

}  // namespace dc
