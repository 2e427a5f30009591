// Builds a step graph piece by piece, for programs that have its parts at hand. Parts refer to one another by index, so
// names are for people alone; they must differ, so that the text form of the graph can be read back.
#pragma once

#include <string>
#include <unordered_set>

#include "deepcompile/plan/graph.h"

namespace dc::plan {

class StepGraphBuilder {
 public:
  StepGraphBuilder(std::string name, int world, int stage);

  // The index of the new part among its kind. A name that is taken or empty is an error.
  Index add(Param param);
  Index add(Buffer buffer);
  Index add(Node node);

  // The validated graph. The builder is empty afterwards.
  StepGraph build();

 private:
  void take(const std::string& name, std::unordered_set<std::string>& names, const char* what);

  StepGraph graph_;
  std::unordered_set<std::string> things_;  // parameters and buffers: an alias may name either
  std::unordered_set<std::string> nodes_;
};

}  // namespace dc::plan
