#include "deepcompile/bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  dc::bindDirectCalls(module);
  dc::bindInferenceCall(module);
  dc::bindStateOffload(module);  // before the runtime, which has one
  dc::bindStepTrace(module);     // so it has of this
  dc::bindRuntime(module);
  dc::bindSchedule(module);
  dc::bindSavedTensors(module);
  dc::bindShm(module);
}
