// The operators on tensors of any device: find the graph, take its lock, call its executor. Those that hand on their
// input return nothing here; whoever registers them returns it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc::ops {

at::Tensor allgatherParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id,
                          std::optional<at::ScalarType> dtype);
void prefetchParamsFused(std::int64_t graph_id, at::TensorList params, at::IntArrayRef ids,
                         const std::optional<std::vector<at::ScalarType>>& dtypes);
void waitAllgather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void releaseParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users);
void releaseParamTraced(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users);
at::Tensor reduceGrad(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
// The same, called by the backward of the gather itself. `given`: nobody writes to the gradient's memory any more.
at::Tensor reduceGradOfGather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, bool given);
void freeTensors(at::TensorList a);
at::Tensor offloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
at::Tensor reloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void waitOffload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void waitReload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void offloadParameter(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void reloadParameter(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void endBackward(std::int64_t graph_id);

// The engine's operators, which find the parameter by its shard. The guard against writing to what gather_shard
// returns: none, an error at once, or an error later if anything was changed.
constexpr std::int64_t kNoGuard = 0;
constexpr std::int64_t kForbidWriting = 1;
std::int64_t idOfShard(const at::Tensor& shard, std::int64_t graph_id);
at::Tensor gatherShard(const at::Tensor& shard, std::int64_t graph_id, at::IntArrayRef shape,
                       std::optional<at::ScalarType> dtype, bool keep, std::int64_t guard);
// `gathered`, which a program read from its module outside of a forward, is not to be taken for the parameter.
void refuseUseAsParameter(const at::Tensor& gathered, const at::Tensor& shard, std::int64_t graph_id);
void prefetchShards(at::TensorList shards, std::int64_t graph_id, const std::vector<at::ScalarType>& dtypes);
at::Tensor reduceShard(const at::Tensor& grad, const at::Tensor& shard, std::int64_t graph_id, bool given);
// Many at once. `shapes` has all sizes one after the other, `dims` how many of them are each one's.
std::vector<at::Tensor> gatherShards(at::TensorList shards, std::int64_t graph_id, at::IntArrayRef shapes,
                                     at::IntArrayRef dims);
void reduceShards(at::TensorList grads, at::TensorList shards, std::int64_t graph_id, at::IntArrayRef given);
void moveStates(std::int64_t graph_id, at::IntArrayRef leave, at::IntArrayRef let_go, at::IntArrayRef fetch);

}  // namespace dc::ops
