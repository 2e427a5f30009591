// ZeRO-1: optimizer states are sharded. Gradients add up on each rank and travel only in the backward before an update.
#pragma once

#include "deepcompile/runtime/z2_executor.h"

namespace dc {

class Z1CustomOpExecutor : public Z2CustomOpExecutor {
 public:
  template <typename... Arguments>
  explicit Z1CustomOpExecutor(Arguments&&... arguments) : Z2CustomOpExecutor(std::forward<Arguments>(arguments)...) {
    reducer().travel(GradientsTravel::BeforeAnUpdate);
  }
  const char* stageName() const override { return "ZeRO-1"; }
};

}  // namespace dc
