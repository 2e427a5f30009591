// The operators on tensors of any device: find the graph, take its lock, call its executor.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc::ops {

at::Tensor allgatherParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::optional<at::ScalarType> dtype);
void prefetchParamsFused(std::int64_t graph_id, at::TensorList params, at::IntArrayRef ids,
                         const std::optional<std::vector<at::ScalarType>>& dtypes);
at::Tensor waitAllgather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
at::Tensor releaseParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users);
at::Tensor releaseParamTraced(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users);
at::Tensor reduceGrad(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void freeTensors(at::TensorList a);
at::Tensor offloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
at::Tensor reloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
at::Tensor waitOffload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
at::Tensor waitReload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void offloadParameter(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void reloadParameter(const at::Tensor& a, std::int64_t graph_id, std::int64_t id);
void endBackward(std::int64_t graph_id);

}  // namespace dc::ops
