// How a step of the set-up of shared memory went on a rank, as ranks tell one another.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/segment.h"

namespace dc::shm {

struct Outcome {
  enum Kind : char { kTogether = 'T', kNoMemory = 'N', kError = 'X' };
  char kind = kTogether;
  std::string why;

  static Outcome read(const std::string& text) {
    check(!text.empty(), "a rank said nothing about the set-up of shared memory");
    return {text[0], text.substr(1)};
  }
  std::string text() const { return kind + why.substr(0, 3000); }
  bool good() const { return kind == kTogether; }

  // Throws an error; otherwise whether the ranks share memory, and why not.
  bool accept(std::string& reason) const {
    if (kind == kError) {
      throw Error(why);
    }
    if (kind == kNoMemory) {
      reason = why;
    }
    return good();
  }

  // An error goes before a refusal, and the first before later ones.
  void add(const Outcome& other) {
    if ((good() && !other.good()) || (kind == kNoMemory && other.kind == kError)) {
      *this = other;
    }
  }
};

// What becomes of a step of this rank.
inline Outcome attempt(int rank, const std::function<void()>& step) {
  try {
    step();
    return {};
  } catch (const Unavailable& error) {
    return {Outcome::kNoMemory, concat("rank ", rank, " cannot share memory: ", error.what())};
  } catch (const std::exception& error) {
    return {Outcome::kError, concat("rank ", rank, ": ", error.what())};
  }
}

inline Outcome ended(int rank) {
  return {Outcome::kError, concat("rank ", rank, " has ended during the set-up of shared memory")};
}

}  // namespace dc::shm
