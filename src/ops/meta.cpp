// Shapes without work: what tracing needs to know of the operators.
#include <mutex>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "deepcompile/ops/shapes_in_a_row.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/runtime.h"

namespace dc::ops {
namespace {

at::Tensor allgatherParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id,
                          std::optional<at::ScalarType> dtype) {
  const auto graph = GraphTable::global().find(graph_id);
  const std::lock_guard lock(graph->runtime->context().mutex);
  const DSParam& param = graph->runtime->registry().getParam(id);
  return at::empty(param.getShape(), a.options().dtype(dtype.value_or(param.getDtype())).requires_grad(false));
}

at::Tensor gatherShard(const at::Tensor& shard, std::int64_t, at::IntArrayRef shape,
                       std::optional<at::ScalarType> dtype, bool, std::int64_t) {
  return at::empty(shape, shard.options().dtype(dtype.value_or(shard.scalar_type())).requires_grad(false));
}

std::vector<at::Tensor> gatherShardsOfShape(at::TensorList shards, std::int64_t, at::IntArrayRef shapes,
                                            at::IntArrayRef dims) {
  std::vector<at::Tensor> found;
  eachShape(shards.size(), shapes, dims, [&](std::size_t i, at::IntArrayRef shape) {
    found.push_back(at::empty(shape, shards[i].options().requires_grad(false)));
  });
  return found;
}

at::Tensor reduceShard(const at::Tensor& grad, const at::Tensor&, std::int64_t, bool) {
  return at::empty({0}, grad.options().requires_grad(false));
}

at::Tensor reduceGrad(const at::Tensor& a, std::int64_t, std::int64_t) {
  return at::empty({0}, a.options().requires_grad(false));
}

at::Tensor same(const at::Tensor& a, std::int64_t, std::int64_t) { return aliasOf(a); }
at::Tensor sameReleased(const at::Tensor& a, std::int64_t, std::int64_t, std::int64_t) { return aliasOf(a); }
void nothing(const at::Tensor&, std::int64_t, std::int64_t) {}
void noPrefetch(std::int64_t, at::TensorList, at::IntArrayRef, const std::optional<std::vector<at::ScalarType>>&) {}
void noFree(at::TensorList) {}
void noPrefetchOfShards(at::TensorList, std::int64_t, const std::vector<at::ScalarType>&) {}
void noReductions(at::TensorList, at::TensorList, std::int64_t, at::IntArrayRef) {}
void noEnd(std::int64_t) {}

}  // namespace
}  // namespace dc::ops

TORCH_LIBRARY_IMPL(dc, Meta, m) {
  using namespace dc::ops;
  m.impl("allgather_param", allgatherParam);
  m.impl("prefetch_params_fused", noPrefetch);
  m.impl("wait_allgather", same);
  m.impl("release_param", sameReleased);
  m.impl("release_param_traced", sameReleased);
  m.impl("reduce_grad", reduceGrad);
  m.impl("free_tensors", noFree);
  // offload_tensor and reload_tensor return tensors of another device, which a kernel for Meta cannot say:
  // runtime/fakes.py.
  m.impl("wait_offload", same);
  m.impl("wait_reload", same);
  m.impl("offload_parameter", nothing);
  m.impl("reload_parameter", nothing);
  m.impl("end_backward", noEnd);
  m.impl("gather_shard", gatherShard);
  m.impl("prefetch_shards", noPrefetchOfShards);
  m.impl("reduce_shard", reduceShard);
  m.impl("gather_shards", gatherShardsOfShape);
  m.impl("reduce_shards", noReductions);
}
