// Turns uses of a sharded parameter that would silently give wrong results into errors that name it.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/late_error.h"

namespace dc {

// For a copy that was read from its module outside of a forward, and which the program may take for the parameter.
// Setting its gradient is an error at once; `requires_grad_` is an error that is set in `late` when the copy is freed.
// `label` names the parameter.
void refuseUseAsParameter(const at::Tensor& gathered, std::shared_ptr<const std::string> label,
                          std::shared_ptr<LateError> late);

// Makes a nonzero gradient that autograd accumulates into the shard itself an error with this message. Gradients of
// gathered copies are reduced and never come here, so the program must have computed with a rank's part. `shard` is a
// leaf that requires a gradient. Called once for each shard.
void refuseDirectGradients(const at::Tensor& shard, std::string message);

}  // namespace dc
