// Step graphs of known models, from their shapes and a roofline of the machine.
#pragma once

#include <string_view>
#include <vector>

#include "deepcompile/plan/graph.h"
#include "deepcompile/plan/machine.h"

namespace dc::plan {

struct ModelOptions {
  int world = 8;
  int batch = 1;
  int sequence = 1024;
  int accumulate = 1;
  int stage = 3;
  Dtype dtype = Dtype::BF16;
  bool checkpoint = true;       // keep only each layer's input, compute the rest again in backward
  bool host_optimizer = false;  // states stay in host memory and the host updates them (ZeRO-Offload)
};

std::vector<std::string_view> modelNames();

// An unknown model is an error that names the nearest.
StepGraph makeModel(std::string_view model, const ModelOptions& options, const Machine& machine);

}  // namespace dc::plan
