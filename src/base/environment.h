// Every environment variable that the library reads, in one place.
#pragma once

#include <string>

namespace dc {

struct Environment {
  // DEEPCOMPILE_CPU_STREAM = auto | inline | worker. How asynchronous work on CPU tensors is run: on the calling thread
  // at once, on a thread of its own, or chosen by what the communicator and the cores allow (docs/runtime.md).
  std::string cpu_stream = "auto";

  // DEEPCOMPILE_LOG = error | warning | info | debug. What is written to standard error.
  std::string log = "warning";

  // Reads the process's environment. A value that is not listed above is an error that names the variable.
  static Environment read();
};

}  // namespace dc
