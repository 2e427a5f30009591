#include "deepcompile/plan/graph_builder.h"

#include <utility>

#include "deepcompile/base/error.h"

namespace dc::plan {

StepGraphBuilder::StepGraphBuilder(std::string name, int world, int stage) {
  graph_.name = std::move(name);
  graph_.world = world;
  graph_.stage = stage;
}

void StepGraphBuilder::take(const std::string& name, std::unordered_set<std::string>& names, const char* what) {
  check(!name.empty(), [&] { return concat("graph '", graph_.name, "': a ", what, " without a name"); });
  check(names.insert(name).second,
        [&] { return concat("graph '", graph_.name, "': the name '", name, "' of a ", what, " is taken"); });
}

Index StepGraphBuilder::add(Param param) {
  take(param.name, things_, "param");
  graph_.params.push_back(std::move(param));
  return static_cast<Index>(graph_.params.size()) - 1;
}

Index StepGraphBuilder::add(Buffer buffer) {
  take(buffer.name, things_, "buffer");
  graph_.buffers.push_back(std::move(buffer));
  return static_cast<Index>(graph_.buffers.size()) - 1;
}

Index StepGraphBuilder::add(Node node) {
  take(node.name, nodes_, "node");
  graph_.nodes.push_back(std::move(node));
  return static_cast<Index>(graph_.nodes.size()) - 1;
}

StepGraph StepGraphBuilder::build() {
  StepGraph built = std::exchange(graph_, {});
  things_.clear();
  nodes_.clear();
  validate(built);
  return built;
}

}  // namespace dc::plan
