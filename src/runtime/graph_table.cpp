#include "deepcompile/runtime/graph_table.h"

#include <mutex>
#include <utility>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {

void GraphTable::add(std::shared_ptr<const Graph> graph) {
  const std::unique_lock lock(mutex_);
  const std::int64_t id = graph->id;
  check(graphs_.emplace(id, std::move(graph)).second, [&] {
    return concat(
        "graph ", id,
        " is registered already; graph ids are unique in the process, also between runtimes, and an engine's model "
        "takes the lowest free one (0) for itself");
  });
}

void GraphTable::remove(std::int64_t graph_id) {
  const std::unique_lock lock(mutex_);
  graphs_.erase(graph_id);
}

std::vector<std::int64_t> GraphTable::ids() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::int64_t> known;
  for (const auto& entry : graphs_) {
    known.push_back(entry.first);
  }
  return known;
}

std::shared_ptr<const Graph> GraphTable::find(std::int64_t graph_id) const {
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = graphs_.find(graph_id); found != graphs_.end()) [[likely]] {
      return found->second;
    }
  }
  const std::vector<std::int64_t> known = ids();
  fail("no graph with id ", graph_id, " is registered",
       known.empty() ? " (is the runtime initialised? dc.init, then "
                       "dc.register_graph_z1, z2 or z3)"
                     : "; known ids: ",
       join_as_str(known, ", ", 100));
}

GraphTable& GraphTable::global() {
  static GraphTable table;
  return table;
}

}  // namespace dc
