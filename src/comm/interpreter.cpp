#include "deepcompile/comm/interpreter.h"

#include <atomic>

namespace dc {
namespace {

std::atomic<WithoutInterpreter> without{nullptr};

}  // namespace

void setWithoutInterpreter(WithoutInterpreter how) { without.store(how); }

void withoutInterpreter(const std::function<void()>& function) {
  if (const WithoutInterpreter how = without.load()) {
    how(function);
  } else {
    function();
  }
}

}  // namespace dc
