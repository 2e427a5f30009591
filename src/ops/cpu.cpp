#include <torch/library.h>

#include "deepcompile/ops/kernels.h"

TORCH_LIBRARY_IMPL(dc, CPU, m) {
  using namespace dc::ops;
  m.impl("allgather_param", allgatherParam);
  m.impl("prefetch_params_fused", prefetchParamsFused);
  m.impl("wait_allgather", waitAllgather);
  m.impl("release_param", releaseParam);
  m.impl("reduce_grad", reduceGrad);
  m.impl("free_tensors", freeTensors);
  m.impl("offload_tensor", offloadTensor);
  m.impl("reload_tensor", reloadTensor);
  m.impl("wait_offload", waitOffload);
  m.impl("wait_reload", waitReload);
  m.impl("offload_parameter", offloadParameter);
  m.impl("reload_parameter", reloadParameter);
  m.impl("end_backward", endBackward);
}

// Without a tensor argument there is no device to choose a kernel by.
TORCH_LIBRARY_IMPL(dc, Undefined, m) {
  m.impl("end_backward", dc::ops::endBackward);
  m.impl("prefetch_params_fused", dc::ops::prefetchParamsFused);  // with an empty list
  m.impl("free_tensors", dc::ops::freeTensors);
}
