// Precompiled: the headers that most files of the torch layers pull in, at several seconds each time.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
