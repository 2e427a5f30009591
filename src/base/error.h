// The one exception type of the project. An error says what went wrong, where, and what to do about it.
#pragma once

#include <concepts>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace dc {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// All parts written one after the other, as by operator<<.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(concat(parts...));
}

// Throws when `ok` is false. The message is a callable, so that it costs nothing while all is well.
template <std::invocable Message>
inline void check(bool ok, Message&& message) {
  if (!ok) [[unlikely]] {
    throw Error(std::forward<Message>(message)());
  }
}

inline void check(bool ok, const char* message) {
  if (!ok) [[unlikely]] {
    throw Error(message);
  }
}

}  // namespace dc
