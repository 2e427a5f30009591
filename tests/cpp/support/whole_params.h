// Parameters of ZeRO-1 and 2 with awkward partitions, their gradients and what must come of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "support/ranks.h"

namespace dc::testing {

struct Whole {
  std::int64_t id;
  std::int64_t numel;
  std::vector<Slice> owners;  // by rank
};

// For three ranks: uneven slices, one rank that owns everything, a boundary inside with a rank that owns nothing,
// slices that are not in rank order, no elements at all, and a single element.
inline std::vector<Whole> awkwardParams() {
  return {{1, 10, {{0, 7}, {7, 8}, {8, 10}}}, {2, 6, {{0, 0}, {0, 6}, {0, 0}}}, {3, 9, {{0, 4}, {4, 4}, {4, 9}}},
          {4, 8, {{5, 8}, {0, 2}, {2, 5}}},   {5, 0, {{0, 0}, {0, 0}, {0, 0}}}, {6, 1, {{0, 0}, {0, 0}, {0, 1}}}};
}

// For two ranks, with the boundary inside the second.
inline std::vector<Whole> plainParams() {
  return {{1, 6, {{0, 6}, {0, 0}}}, {2, 10, {{0, 3}, {3, 10}}}, {3, 4, {{0, 0}, {0, 4}}}};
}

inline void addAll(Rank& rank, const std::vector<Whole>& params, at::ScalarType dtype = at::kFloat) {
  for (const Whole& param : params) {
    rank.addWhole(param.id, {param.numel}, param.owners[rank.rank()], dtype);
  }
}

inline std::vector<std::int64_t> idsOf(const std::vector<Whole>& params) {
  std::vector<std::int64_t> ids;
  for (const Whole& param : params) {
    ids.push_back(param.id);
  }
  return ids;
}

// Registers the parameters, makes one graph of them and agrees with the other ranks.
template <typename Executor>
std::shared_ptr<Executor> graphOf(Rank& rank, const std::vector<Whole>& params, at::ScalarType dtype = at::kFloat) {
  addAll(rank, params, dtype);
  auto graph = rank.graph<Executor>(1, idsOf(params));
  rank.agree();
  return graph;
}

// All gradients, last parameter first.
inline void giveGradients(CustomOpExecutor& graph, const Rank& rank, const std::vector<Whole>& params,
                          int backward = 0) {
  for (auto param = params.rbegin(); param != params.rend(); ++param) {
    graph.reduceGrad(gradientOf(rank.rank(), param->id, param->numel, backward), param->id);
  }
}

inline void runBackward(CustomOpExecutor& graph, const Rank& rank, const std::vector<Whole>& params, bool update = true,
                        int backward = 0) {
  graph.startBackward(update);
  giveGradients(graph, rank, params, backward);
  graph.endBackward();
}

// This rank's slice of a whole gradient.
inline at::Tensor sliceOf(const Whole& param, const Rank& rank, const at::Tensor& whole) {
  const Slice own = param.owners[rank.rank()];
  return whole.narrow(0, own.begin, own.size());
}

// Every gradient buffer holds this rank's slice of the sum of the means of these backwards.
inline void expectMeans(const Rank& rank, const std::vector<Whole>& params, const std::vector<int>& backwards = {0}) {
  for (const Whole& param : params) {
    at::Tensor sum = at::zeros({param.numel}, at::kDouble);
    for (const int backward : backwards) {
      sum += meanGradient(rank.setup.ranks, param.id, param.numel, backward);
    }
    EXPECT_TRUE(close(rank.gradient(param.id), sliceOf(param, rank, sum)))
        << "parameter " << param.id << " on rank " << rank.rank();
  }
}

}  // namespace dc::testing
