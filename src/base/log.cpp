#include "deepcompile/base/log.h"

#include <unistd.h>

#include <array>
#include <string>

#include "deepcompile/base/environment.h"

namespace dc {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"error", "warning", "info", "debug"};

LogLevel threshold() {
  static const LogLevel level = [] {
    const std::string name = Environment::read().log;
    std::size_t index = 0;
    while (kNames[index] != name) {
      ++index;
    }
    return static_cast<LogLevel>(index);
  }();
  return level;
}

}  // namespace

bool logs(LogLevel level) { return level <= threshold(); }

void log(LogLevel level, std::string_view line) {
  if (!logs(level)) {
    return;
  }
  std::string text = "deepcompile ";
  text += kNames[static_cast<std::size_t>(level)];
  text += ": ";
  text += line;
  text += '\n';
  // A log line that cannot be written is not worth failing for.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace dc
