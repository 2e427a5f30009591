// Precompiled: pybind11 with PyTorch's converters.
#pragma once

#include <torch/csrc/utils/pybind.h>
