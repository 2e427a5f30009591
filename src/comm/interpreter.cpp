#include "deepcompile/comm/interpreter.h"

#include <atomic>

namespace dc {
namespace {

std::atomic<const Interpreter*> the_interpreter{nullptr};

void* release() {
  const Interpreter* const interpreter = the_interpreter.load(std::memory_order_acquire);
  return interpreter == nullptr ? nullptr : interpreter->release();
}

}  // namespace

void setInterpreter(const Interpreter& interpreter) { the_interpreter.store(&interpreter, std::memory_order_release); }

InterpreterReleased::InterpreterReleased() : released_(release()) {}

InterpreterReleased::~InterpreterReleased() {
  if (released_ != nullptr) {
    the_interpreter.load(std::memory_order_acquire)->take(released_);
  }
}

}  // namespace dc
