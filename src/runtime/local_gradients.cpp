#include "deepcompile/runtime/local_gradients.h"

#include <utility>

#include <ATen/Functions.h>

namespace dc {

void LocalGradients::add(const DSParam& param, const at::Tensor& grad) {
  Local& local = local_[param.getId()];
  if (!local.sum.defined()) {
    local.sum = at::empty({param.numel()}, grad.options().dtype(param.getAccumulationDtype()).requires_grad(false));
  }
  const at::Tensor flat = grad.reshape({-1});
  if (local.holds) {
    local.sum.add_(flat);
  } else {
    local.sum.copy_(flat);
  }
  local.holds = true;
}

at::Tensor LocalGradients::take(const DSParam& param, at::Tensor grad) {
  const auto found = local_.find(param.getId());
  if (found == local_.end() || !found->second.holds) {
    return grad;
  }
  if (grad.defined()) {
    add(param, grad);
  }
  found->second.holds = false;
  return found->second.sum;
}

void LocalGradients::discard(std::int64_t ds_id) {
  if (const auto found = local_.find(ds_id); found != local_.end()) {
    found->second.holds = false;
  }
}

}  // namespace dc
