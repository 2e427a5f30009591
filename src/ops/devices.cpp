#include <torch/library.h>

#include "deepcompile/ops/kernels.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace {

// Below autograd an operator may return an alias of its input but not the input itself.
template <auto kernel, typename... Rest>
at::Tensor aliasAfter(const at::Tensor& a, Rest... rest) {
  kernel(a, rest...);
  return dc::aliasOf(a);
}

// The runtime of the graph knows the device; the kernels are the same for all.
void registerKernels(torch::Library& m) {
  using namespace dc::ops;
  m.impl("allgather_param", allgatherParam);
  m.impl("wait_allgather", aliasAfter<waitAllgather, std::int64_t, std::int64_t>);
  m.impl("release_param", aliasAfter<releaseParam, std::int64_t, std::int64_t, std::int64_t>);
  m.impl("release_param_traced", aliasAfter<releaseParamTraced, std::int64_t, std::int64_t, std::int64_t>);
  m.impl("reduce_grad", reduceGrad);
  m.impl("offload_tensor", offloadTensor);
  m.impl("reload_tensor", reloadTensor);
  m.impl("wait_offload", aliasAfter<waitOffload, std::int64_t, std::int64_t>);
  m.impl("wait_reload", aliasAfter<waitReload, std::int64_t, std::int64_t>);
  m.impl("offload_parameter", offloadParameter);
  m.impl("reload_parameter", reloadParameter);
  m.impl("gather_shard", gatherShard);
  m.impl("reduce_shard", reduceShard);
}

}  // namespace

TORCH_LIBRARY_IMPL(dc, CPU, m) { registerKernels(m); }
TORCH_LIBRARY_IMPL(dc, CUDA, m) { registerKernels(m); }

// These may be called without any tensor, which would choose a device's kernel. (Not the catch-all key: tracing runs
// kernels that are registered there.)
TORCH_LIBRARY_IMPL(dc, CompositeExplicitAutograd, m) {
  using namespace dc::ops;
  m.impl("prefetch_params_fused", prefetchParamsFused);
  m.impl("free_tensors", freeTensors);
  m.impl("end_backward", endBackward);
  m.impl("prefetch_shards", prefetchShards);
  m.impl("gather_shards", gatherShards);
  m.impl("reduce_shards", reduceShards);
}
