#include "deepcompile/shm/meaning.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "deepcompile/base/error.h"

namespace dc::shm {
namespace {

std::string_view name(Kind kind) {
  switch (kind) {
    case Kind::AllReduce:
      return "all_reduce";
    case Kind::AllGather:
      return "all_gather";
    case Kind::ReduceScatter:
      return "reduce_scatter";
    case Kind::Broadcast:
      return "broadcast";
    case Kind::Reduce:
      return "reduce";
    case Kind::Gather:
      return "gather";
    case Kind::Scatter:
      return "scatter";
    case Kind::AllToAll:
      return "all_to_all";
    case Kind::Barrier:
      return "barrier";
    case Kind::Tune:
      return "tune";
  }
  return "an unknown operation";
}

// Callers may write a word into a tag (comm/shm_tensors.h does).
std::string textOfTag(std::uint64_t tag) {
  std::string word(reinterpret_cast<const char*>(&tag), sizeof(tag));
  word.resize(std::min(word.find('\0'), word.size()));
  const bool readable =
      std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  return readable && word.size() > 1 && (tag >> (8 * word.size() - 1) >> 1) == 0 ? word : concat("tag ", tag);
}

}  // namespace

std::string text(const Meaning& meaning) {
  std::string out = concat(name(meaning.kind), "(");
  if (meaning.reduces != 0) {
    out += concat(dc::shm::name(meaning.op), ", ", dc::shm::name(meaning.dtype), ", ", meaning.count, " elements");
  } else if (meaning.kind != Kind::Barrier && meaning.kind != Kind::Tune) {
    out += concat(meaning.count, " bytes");
  }
  if (meaning.root >= 0) {
    out += concat(", root ", meaning.root);
  }
  if (meaning.tag != 0) {
    out += concat(", ", textOfTag(meaning.tag));
  }
  return out + ")";
}

}  // namespace dc::shm
