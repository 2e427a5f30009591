#include "deepcompile/base/environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <system_error>
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

void readNumber(const char* variable, std::int64_t& value, const char* unit) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return;
  }
  const char* end = text + std::strlen(text);
  const auto [stopped, error] = std::from_chars(text, end, value);
  check(error == std::errc() && stopped == end && value >= 0,
        [&] { return concat("environment variable ", variable, "='", text, "': expected a number of ", unit); });
}

}  // namespace

Environment Environment::read() {
  Environment environment;
  readChoice("DEEPCOMPILE_CPU_STREAM", environment.cpu_stream, {"auto", "inline", "worker"});
  readChoice("DEEPCOMPILE_COMMUNICATOR", environment.communicator, {"auto", "c10d"});
  readChoice("DEEPCOMPILE_LOG", environment.log, {"error", "warning", "info", "debug"});
  readNumber("DEEPCOMPILE_SHM_ONE_STEP_BYTES", environment.shm_one_step_bytes, "bytes");
  readNumber("DEEPCOMPILE_SHM_CHUNK_BYTES", environment.shm_chunk_bytes, "bytes");
  readNumber("DEEPCOMPILE_SHM_STREAMING_BYTES", environment.shm_streaming_bytes, "bytes");
  readNumber("DEEPCOMPILE_STREAM_DELAY_US", environment.stream_delay_us, "microseconds");
  readChoice("DEEPCOMPILE_MALLOC", environment.malloc, {"tuned", "unchanged"});
  readChoice("DEEPCOMPILE_READ_IN_PLACE", environment.read_in_place, {"auto", "off"});
  readChoice("DEEPCOMPILE_OFFLOAD", environment.offload, {"auto", "always"});
  readChoice("DEEPCOMPILE_SYMMETRIC_REDUCTIONS", environment.symmetric_reductions, {"auto", "always", "never"});
  return environment;
}

}  // namespace dc
