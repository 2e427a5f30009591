// What module.cpp puts together.
#pragma once

#include <pybind11/pybind11.h>

namespace dc {

void bindDirectCalls(pybind11::module_& module);
void bindInferenceCall(pybind11::module_& module);
void bindSchedule(pybind11::module_& module);
void bindRuntime(pybind11::module_& module);
void bindSavedTensors(pybind11::module_& module);
void bindShm(pybind11::module_& module);
void bindStateOffload(pybind11::module_& module);
void bindStepTrace(pybind11::module_& module);

}  // namespace dc
