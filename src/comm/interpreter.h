// Python's lock, for a library that does not know Python: threads that run Python callbacks are joined without it.
#pragma once

#include <functional>

namespace dc {

// Runs the function while this thread does not hold the interpreter. The Python module sets how; without Python the
// function is called as it is.
using WithoutInterpreter = void (*)(const std::function<void()>& function);
void setWithoutInterpreter(WithoutInterpreter how);
void withoutInterpreter(const std::function<void()>& function);

}  // namespace dc
