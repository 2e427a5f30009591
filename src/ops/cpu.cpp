#include <torch/library.h>

#include "deepcompile/ops/kernels.h"

TORCH_LIBRARY_IMPL(dc, CPU, m) {
  using namespace dc::ops;
  m.impl("allgather_param", allgatherParam);
  m.impl("wait_allgather", waitAllgather);
  m.impl("release_param", releaseParam);
  m.impl("release_param_traced", releaseParamTraced);
  m.impl("reduce_grad", reduceGrad);
  m.impl("offload_tensor", offloadTensor);
  m.impl("reload_tensor", reloadTensor);
  m.impl("wait_offload", waitOffload);
  m.impl("wait_reload", waitReload);
  m.impl("offload_parameter", offloadParameter);
  m.impl("reload_parameter", reloadParameter);
}

// These may be called without any tensor, which would choose a device's kernel. (Not the catch-all key: tracing runs
// kernels that are registered there.)
TORCH_LIBRARY_IMPL(dc, CompositeExplicitAutograd, m) {
  using namespace dc::ops;
  m.impl("prefetch_params_fused", prefetchParamsFused);
  m.impl("free_tensors", freeTensors);
  m.impl("end_backward", endBackward);
}
