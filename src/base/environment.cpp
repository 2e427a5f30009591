#include "deepcompile/base/environment.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {
namespace {

void readChoice(const char* variable, std::string& value, const std::vector<std::string>& choices) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return;
  }
  check(std::find(choices.begin(), choices.end(), text) != choices.end(), [&] {
    return concat("environment variable ", variable, "='", text, "': expected one of ", join_as_str(choices, ", "));
  });
  value = text;
}

}  // namespace

Environment Environment::read() {
  Environment environment;
  readChoice("DEEPCOMPILE_CPU_STREAM", environment.cpu_stream, {"auto", "inline", "worker"});
  readChoice("DEEPCOMPILE_LOG", environment.log, {"error", "warning", "info", "debug"});
  return environment;
}

}  // namespace dc
