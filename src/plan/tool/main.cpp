// deepcompile-plan: the planner's command without Python, which starts in milliseconds.
#include <iostream>

#include "deepcompile/plan/command.h"

int main(int argc, char** argv) {
  const dc::plan::CommandResult result = dc::plan::runCommand({argv + 1, argv + argc});
  std::cout << result.out << std::flush;
  std::cerr << result.error << std::flush;
  return result.status;
}
