// Small helpers on containers and their text, part of the installed API (contract of the C++ surface).
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <unordered_map>

namespace dc {

template <typename K, typename V>
bool hasKey(const std::unordered_map<K, V>& map, const K& key) {
  return map.find(key) != map.end();
}

template <typename T>
inline std::string to_string(const T& v) {
  std::ostringstream out;
  out << v;
  return out.str();
}

// The elements of `v` with `delim` between them. With `maxlen` > 0 the text is cut there and ends in "...".
template <typename T>
std::string join_as_str(const T& v, const char* delim = ",", const std::size_t maxlen = 0) {
  std::ostringstream out;
  bool first = true;
  for (const auto& element : v) {
    if (!first) {
      out << delim;
    }
    first = false;
    out << element;
  }
  std::string text = out.str();
  if (maxlen > 0 && text.size() > maxlen) {
    text.resize(maxlen);
    text += "...";
  }
  return text;
}

// The number of elements of a tensor with these dimensions: 1 for a scalar.
template <typename L>
std::size_t productDim(const L& dim) {
  std::size_t product = 1;
  for (const auto size : dim) {
    product *= static_cast<std::size_t>(size);
  }
  return product;
}

}  // namespace dc
