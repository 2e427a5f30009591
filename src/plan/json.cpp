#include "deepcompile/plan/json.h"

#include <array>
#include <cstdio>

namespace dc::plan {

void Json::separate() {
  if (!first_ && !keyed_) {
    out_ += ',';
  }
  first_ = false;
  keyed_ = false;
}

Json& Json::open(char bracket) {
  separate();
  out_ += bracket;
  first_ = true;
  return *this;
}

Json& Json::close(char bracket) {
  out_ += bracket;
  first_ = false;
  return *this;
}

void Json::quote(std::string_view text) {
  out_ += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out_ += '\\';
      out_ += c;
    } else if (static_cast<unsigned char>(c) < 32) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", c);
      out_ += escaped.data();
    } else {
      out_ += c;
    }
  }
  out_ += '"';
}

Json& Json::key(std::string_view name) {
  separate();
  quote(name);
  out_ += ':';
  keyed_ = true;
  return *this;
}

Json& Json::value(std::string_view text) {
  separate();
  quote(text);
  return *this;
}

Json& Json::value(std::int64_t number) {
  separate();
  out_ += std::to_string(number);
  return *this;
}

Json& Json::value(bool flag) {
  separate();
  out_ += flag ? "true" : "false";
  return *this;
}

Json& Json::real(double number) {
  separate();
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.6g", number);
  out_ += text.data();
  return *this;
}

}  // namespace dc::plan
