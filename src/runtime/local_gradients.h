// Whole gradients that add up on a rank until the backward before an update.
#pragma once

#include <cstdint>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/param.h"

namespace dc {

class LocalGradients {
 public:
  void add(const DSParam& param, const at::Tensor& grad);
  // The sum of all added gradients and `grad` (may be undefined), which resets the sum. Undefined if there are none.
  at::Tensor take(const DSParam& param, at::Tensor grad);
  // Discards what was added.
  void discard(std::int64_t ds_id);

 private:
  struct Local {
    at::Tensor sum;      // the whole gradient, in the dtype of the gradient buffer; kept for the next accumulation
    bool holds = false;  // something was added since the last update
  };
  std::unordered_map<std::int64_t, Local> local_;
};

}  // namespace dc
