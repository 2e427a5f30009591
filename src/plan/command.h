// The command line of the planner, as a function: the commands `plan` and `simulate` in every front end.
#pragma once

#include <string>
#include <vector>

namespace dc::plan {

struct CommandResult {
  int status = 0;     // see the exit codes below
  std::string out;    // for standard output
  std::string error;  // for standard error
};

inline constexpr int kDone = 0;
inline constexpr int kBadUsage = 2;    // an unknown option or value
inline constexpr int kBadInput = 3;    // a malformed or impossible graph or machine
inline constexpr int kDoesNotFit = 4;  // no plan within the budget
inline constexpr int kRefused = 5;     // the verifier refused the plan

// `arguments` without the program's name: {"plan", "step.graph", "--budget", "40GB"}. `program` is how the user calls
// it, for the help and for errors that name a command.
CommandResult runCommand(const std::vector<std::string>& arguments, const std::string& program = "deepcompile-plan");

}  // namespace dc::plan
