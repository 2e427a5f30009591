#include "deepcompile/runtime/graph_members.h"

#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {

GraphMembers::GraphMembers(std::shared_ptr<DSParamRegistry> registry, std::vector<std::int64_t> ids, std::string place)
    : registry_(std::move(registry)), ids_(std::move(ids)), set_(ids_.begin(), ids_.end()), place_(std::move(place)) {
  check(set_.size() == ids_.size(),
        [&] { return concat("a graph lists a parameter twice: ids ", join_as_str(ids_, ", ", 200)); });
}

void GraphMembers::refuse(std::int64_t id) const {
  fail(registry_->hasParam(id) ? registry_->getParam(id).describe() : concat("parameter id ", id, " (not registered)"),
       " does not belong to this graph, whose ids are [", join_as_str(ids_, ", ", 200), "] (", place_, ")");
}

}  // namespace dc
