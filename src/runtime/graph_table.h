// Finds the executor of a graph id, for the operators. Graph ids are unique in the process and so select the runtime.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/tensor_offload.h"

namespace dc {

class Runtime;
class Z3CustomOpExecutor;

struct Graph {
  std::int64_t id;
  Runtime* runtime;  // removes its graphs from the table before it goes
  std::shared_ptr<CustomOpExecutor> executor;
  Z3CustomOpExecutor* z3;  // the executor, where it is of that stage; else null
  std::shared_ptr<TensorOffload> offload;
};

class GraphTable {
 public:
  // Throws when the id is taken.
  void add(std::shared_ptr<const Graph> graph);
  void remove(std::int64_t graph_id);
  std::vector<std::int64_t> ids() const;
  // Throws when there is none.
  std::shared_ptr<const Graph> find(std::int64_t graph_id) const;

  // The table of the process.
  static GraphTable& global();

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::int64_t, std::shared_ptr<const Graph>> graphs_;
};

}  // namespace dc
