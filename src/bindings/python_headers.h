// Precompiled: pybind11 with PyTorch's converters, and what our own headers include of PyTorch.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "deepcompile/torch_headers.h"
