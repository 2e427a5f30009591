// Uses of a sharded parameter that would be wrong without a word, made into errors that name it.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/late_error.h"

namespace dc {

// `gathered` was read from its module outside of a forward. It looks like the parameter and is a copy: setting its
// gradient is an error at once, `requires_grad_` one that `late` has as soon as the copy is gone.
// `label` names the parameter.
void refuseUseAsParameter(const at::Tensor& gathered, std::shared_ptr<const std::string> label,
                          std::shared_ptr<LateError> late);

// A gradient other than zero that autograd brings to the shard itself is an error with this message: gradients of
// gathered copies are reduced and never come here, so the program has computed with a rank's part. `shard` is a leaf
// that requires a gradient. Once is enough.
void refuseDirectGradients(const at::Tensor& shard, std::string message);

}  // namespace dc
