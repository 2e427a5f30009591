// The pieces that the text forms of graphs, machines and plans share: words with their place,
// numbers with units, and errors that say where and why.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/types.h"

namespace dc::plan {

// A malformed text: "FILE:LINE:COLUMN: reason".
class ParseError : public Error {
 public:
  ParseError(const std::string& file, int line, int column, const std::string& reason)
      : Error(concat(file, ":", line, ":", column, ": ", reason)), line(line), column(column) {}
  int line;
  int column;
};

// A word of a line and where it stands (columns count bytes from 1).
struct Word {
  std::string_view text;
  int column;
};

// KEY or KEY=VALUE.
struct Field {
  Word key;
  Word value;  // empty text at the place after '=' when there is none
  bool has_value = false;
};

// Walks a text line by line. The text must outlive the reader and every word taken from it.
class TextReader {
 public:
  TextReader(std::string_view text, std::string file) : text_(text), file_(std::move(file)) {}

  // Moves to the next line that holds a word; comments run from '#' to the end of the line. False
  // at the end.
  bool nextLine();
  const std::vector<Word>& words() const { return words_; }
  // The word at `index`; without one, an error that says what was expected.
  const Word& word(std::size_t index, std::string_view expected) const;
  Field field(const Word& word) const;
  std::vector<Word> list(const Word& word) const;  // A,B,C

  Bytes bytes(const Word& word) const;  // 512, 4KiB, 1.5GiB, 80GB
  Nanos nanos(const Word& word) const;  // 90, 90ns, 12us, 1.5ms, 2s
  std::int64_t integer(const Word& word, std::int64_t least, std::int64_t most) const;

  [[noreturn]] void fail(const Word& word, const std::string& reason) const;
  int line() const { return line_; }
  const std::string& file() const { return file_; }

 private:
  std::int64_t quantity(const Word& word, const std::vector<std::pair<std::string_view, std::int64_t>>& units,
                        std::string_view what) const;

  std::string_view text_;
  std::string file_;
  std::size_t at_ = 0;
  int line_ = 0;
  std::vector<Word> words_;
};

// "unknown WHAT 'NAME'", with the nearest of the known names when one is near.
std::string unknown(std::string_view what, std::string_view name, const std::vector<std::string_view>& known);

// Whether a word can be a name: not empty, none of blank , = # in it, and each % begins an escape.
bool isName(std::string_view text);
// Names may hold any character. In a text, the ones that would end a word or a list are written as %XX (their byte in
// hexadecimal), and so is % itself. decodeName(encodeName(x)) == x.
std::string encodeName(std::string_view name);
std::string decodeName(std::string_view word);

// Exact text with the largest unit that divides the value: parse(print(x)) == x.
std::string exactBytes(Bytes bytes);
std::string exactNanos(Nanos nanos);
// For people: three digits, such as 1.23 ms or 45.6 GB.
std::string roundBytes(Bytes bytes);
std::string roundNanos(Nanos nanos);

// Indices by name. Looked up by the name itself, not by how a text writes it.
struct NameHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
using NameTable = std::unordered_map<std::string, Index, NameHash, std::equal_to<>>;

// FNV-1a, the same on every machine; used for the hashes of graphs and plans.
class Hash {
 public:
  void add(std::uint64_t value);
  void add(std::string_view text);
  std::uint64_t value() const { return value_; }
  std::string hex() const;

 private:
  std::uint64_t value_ = 14695981039346656037ull;
};

}  // namespace dc::plan
