#include "deepcompile/plan/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>

namespace dc::plan {
namespace {

bool isBlank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// Edits that turn one word into the other, at most `limit` + 1.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

const std::vector<std::pair<std::string_view, std::int64_t>> kByteUnits = {
    {"", 1},
    {"B", 1},
    {"KiB", std::int64_t{1} << 10},
    {"MiB", std::int64_t{1} << 20},
    {"GiB", std::int64_t{1} << 30},
    {"KB", 1000},
    {"MB", 1000 * 1000},
    {"GB", 1000 * 1000 * 1000},
};
const std::vector<std::pair<std::string_view, std::int64_t>> kTimeUnits = {
    {"", 1}, {"ns", 1}, {"us", 1000}, {"ms", 1000 * 1000}, {"s", 1000 * 1000 * 1000},
};

std::string rounded(std::int64_t value, const std::vector<std::pair<const char*, double>>& units) {
  std::size_t unit = 0;
  while (unit + 1 < units.size() && static_cast<double>(value) >= units[unit + 1].second) {
    ++unit;
  }
  const double scaled = static_cast<double>(value) / units[unit].second;
  std::array<char, 48> text{};
  const int digits = unit == 0 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, scaled, units[unit].first);
  return text.data();
}

}  // namespace

bool TextReader::nextLine() {
  while (at_ < text_.size()) {
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string_view line = text_.substr(at_, end - at_);
    at_ = end + 1;
    ++line_;
    words_.clear();
    for (std::size_t i = 0; i < line.size() && line[i] != '#';) {
      if (isBlank(line[i])) {
        ++i;
        continue;
      }
      const std::size_t begin = i;
      while (i < line.size() && !isBlank(line[i]) && line[i] != '#') {
        ++i;
      }
      words_.push_back({line.substr(begin, i - begin), static_cast<int>(begin) + 1});
    }
    if (!words_.empty()) {
      return true;
    }
  }
  words_.clear();
  return false;
}

const Word& TextReader::word(std::size_t index, std::string_view expected) const {
  if (index >= words_.size()) {
    const Word& last = words_.back();
    fail({"", last.column + static_cast<int>(last.text.size())}, concat("expected ", expected));
  }
  return words_[index];
}

Field TextReader::field(const Word& word) const {
  const std::size_t equals = word.text.find('=');
  if (equals == std::string_view::npos) {
    return {word, {"", word.column + static_cast<int>(word.text.size())}, false};
  }
  return {{word.text.substr(0, equals), word.column},
          {word.text.substr(equals + 1), word.column + static_cast<int>(equals) + 1},
          true};
}

std::vector<Word> TextReader::list(const Word& word) const {
  std::vector<Word> items;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = std::min(word.text.find(',', begin), word.text.size());
    const Word item{word.text.substr(begin, end - begin), word.column + static_cast<int>(begin)};
    if (item.text.empty()) {
      fail(item, "expected a name");
    }
    items.push_back(item);
    if (end == word.text.size()) {
      return items;
    }
    begin = end + 1;
  }
}

// Digits, an optional fraction and a unit. The fraction must come out as a whole number: 1.5KiB but
// not 1.5B.
std::int64_t TextReader::quantity(const Word& word, const std::vector<std::pair<std::string_view, std::int64_t>>& units,
                                  std::string_view what) const {
  const std::string_view text = word.text;
  if (!text.empty() && text[0] == '-') {
    fail(word, concat("negative ", what, " '", text, "'"));
  }
  std::size_t i = 0;
  Wide number = 0;
  Wide divisor = 1;
  bool fraction = false;
  bool digits = false;
  for (; i < text.size(); ++i) {
    if (text[i] == '.' && !fraction) {
      fraction = true;
    } else if (std::isdigit(static_cast<unsigned char>(text[i])) != 0) {
      digits = true;
      number = number * 10 + (text[i] - '0');
      divisor *= fraction ? 10 : 1;
      if (number > static_cast<Wide>(kLargest) * 1000000 || divisor > 1000000000000) {
        fail(word, concat("the ", what, " '", text, "' is too large or has too many digits"));
      }
    } else {
      break;
    }
  }
  if (!digits) {
    fail(word, concat("expected a ", what, ", found '", text, "'"));
  }
  const std::string_view unit = text.substr(i);
  for (const auto& [unit_name, factor] : units) {
    if (unit == unit_name) {
      if (number * factor % divisor != 0) {
        fail(word, concat("'", text, "' is not a whole number of ", what == "time" ? "nanoseconds" : "bytes"));
      }
      const Wide value = number * factor / divisor;
      if (value > kLargest) {
        fail(word, concat("the ", what, " '", text, "' is larger than ", kLargest));
      }
      return static_cast<std::int64_t>(value);
    }
  }
  std::vector<std::string_view> known;
  for (const auto& [unit_name, factor] : units) {
    if (!unit_name.empty()) {
      known.push_back(unit_name);
    }
  }
  fail({unit, word.column + static_cast<int>(i)}, unknown("unit", unit, known));
}

Bytes TextReader::bytes(const Word& word) const { return quantity(word, kByteUnits, "size"); }
Nanos TextReader::nanos(const Word& word) const { return quantity(word, kTimeUnits, "time"); }

std::int64_t TextReader::integer(const Word& word, std::int64_t least, std::int64_t most) const {
  const bool negative = !word.text.empty() && word.text[0] == '-';
  const std::string_view digits = word.text.substr(negative ? 1 : 0);
  std::int64_t value = 0;
  bool good = !digits.empty() && digits.size() <= 18;
  for (const char c : digits) {
    good = good && std::isdigit(static_cast<unsigned char>(c)) != 0;
    value = good ? value * 10 + (c - '0') : 0;
  }
  value = negative ? -value : value;
  if (!good || value < least || value > most) {
    fail(word, concat("expected a whole number from ", least, " to ", most, ", found '", word.text, "'"));
  }
  return value;
}

void TextReader::fail(const Word& word, const std::string& reason) const {
  throw ParseError(file_, line_, word.column, reason);
}

std::string unknown(std::string_view what, std::string_view name, const std::vector<std::string_view>& known) {
  std::string text = concat("unknown ", what, " '", name, "'");
  std::string_view nearest;
  std::size_t least = std::max<std::size_t>(2, name.size() / 2) + 1;
  for (const std::string_view candidate : known) {
    const std::size_t longer = std::max(candidate.size(), name.size());
    const std::size_t shorter = std::min(candidate.size(), name.size());
    if (longer > 200 || longer - shorter >= least) {
      continue;
    }
    if (const std::size_t edits = distance(name, candidate); edits < least) {
      least = edits;
      nearest = candidate;
    }
  }
  if (!nearest.empty()) {
    text += concat("; the nearest is '", nearest, "'");
  } else if (!known.empty() && known.size() <= 12) {
    text += "; known:";
    for (const std::string_view candidate : known) {
      text += concat(" ", candidate);
    }
  }
  return text;
}

namespace {

constexpr std::string_view kHexDigits = "0123456789ABCDEF";

// Names that begin like the items of a plan would be read back as such.
constexpr std::array<std::string_view, 3> kItemPrefixes = {"state:", "shard:", "buffer:"};

bool endsWord(char c) {
  const auto u = static_cast<unsigned char>(c);
  return u <= ' ' || u == 127 || c == ',' || c == '=' || c == '#';
}

std::size_t hexDigit(char c) { return kHexDigits.find(static_cast<char>(std::toupper(static_cast<unsigned char>(c)))); }

// True when a byte is written in hexadecimal behind text[at], a '%'.
bool isEscape(std::string_view text, std::size_t at) {
  return at + 2 < text.size() && hexDigit(text[at + 1]) != std::string_view::npos &&
         hexDigit(text[at + 2]) != std::string_view::npos;
}

}  // namespace

bool isName(std::string_view text) {
  if (text.empty() || text.size() > 3000) {
    return false;
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (endsWord(text[i]) || (text[i] == '%' && !isEscape(text, i))) {
      return false;
    }
  }
  return true;
}

std::string encodeName(std::string_view name) {
  std::size_t colon = std::string_view::npos;
  for (const std::string_view prefix : kItemPrefixes) {
    if (name.starts_with(prefix)) {
      colon = prefix.size() - 1;
    }
  }
  std::string word;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    if (endsWord(name[i]) || name[i] == '%' || i == colon) {
      word += {'%', kHexDigits[byte >> 4], kHexDigits[byte & 15]};
    } else {
      word += name[i];
    }
  }
  return word;
}

std::string decodeName(std::string_view word) {
  std::string name;
  for (std::size_t i = 0; i < word.size(); ++i) {
    if (word[i] == '%' && isEscape(word, i)) {
      name += static_cast<char>(hexDigit(word[i + 1]) << 4 | hexDigit(word[i + 2]));
      i += 2;
    } else {
      name += word[i];
    }
  }
  return name;
}

std::string exactBytes(Bytes bytes) {
  if (bytes != 0) {
    for (const auto& [unit, shift] : {std::pair{"GiB", 30}, {"MiB", 20}, {"KiB", 10}}) {
      if (bytes % (Bytes{1} << shift) == 0) {
        return concat(bytes >> shift, unit);
      }
    }
  }
  return concat(bytes);
}

std::string exactNanos(Nanos nanos) {
  if (nanos != 0) {
    for (const auto& [unit, factor] :
         {std::pair{"s", Nanos{1000000000}}, {"ms", Nanos{1000000}}, {"us", Nanos{1000}}}) {
      if (nanos % factor == 0) {
        return concat(nanos / factor, unit);
      }
    }
  }
  return concat(nanos, "ns");
}

std::string roundBytes(Bytes bytes) {
  return bytes < 0 ? concat("-", roundBytes(-bytes))
                   : rounded(bytes, {{"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}});
}
std::string roundNanos(Nanos nanos) {
  return nanos < 0 ? concat("-", roundNanos(-nanos))
                   : rounded(nanos, {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}});
}

void Hash::add(std::uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    value_ = (value_ ^ ((value >> (8 * i)) & 255)) * 1099511628211ull;
  }
}
void Hash::add(std::string_view text) {
  for (const char c : text) {
    value_ = (value_ ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  add(static_cast<std::uint64_t>(text.size()));
}
std::string Hash::hex() const {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value_));
  return text.data();
}

}  // namespace dc::plan
