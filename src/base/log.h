// Lines on standard error, one write per line so that the ranks' lines do not mix.
#pragma once

#include <string_view>

namespace dc {

enum class LogLevel { Error, Warning, Info, Debug };

// True when lines of this level are written (DEEPCOMPILE_LOG, read once at first use).
bool logs(LogLevel level);

void log(LogLevel level, std::string_view line);

}  // namespace dc
