// Writes JSON: just enough for reports and traces. Commas and quotes are placed by the writer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dc::plan {

class Json {
 public:
  Json& beginObject() { return open('{'); }
  Json& endObject() { return close('}'); }
  Json& beginArray() { return open('['); }
  Json& endArray() { return close(']'); }
  Json& key(std::string_view name);
  Json& value(std::string_view text);
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(std::int64_t number);
  Json& value(bool flag);
  Json& real(double number);

  const std::string& text() const { return out_; }

 private:
  Json& open(char bracket);
  Json& close(char bracket);
  void separate();
  void quote(std::string_view text);

  std::string out_;
  bool first_ = true;   // no comma before the next value
  bool keyed_ = false;  // a key was written, its value comes next
};

}  // namespace dc::plan
