// Memory by slot, with fast answers to "does this fit from here to there": range add, range maximum
// and the nearest slot that is too full, each in O(log n).
#pragma once

#include <vector>

#include "deepcompile/plan/types.h"

namespace dc::plan {

class MemoryTree {
 public:
  explicit MemoryTree(const std::vector<Bytes>& values);

  // Ranges include both ends; an empty range (from > to) is no change and has the maximum 0.
  void add(Index from, Index to, Bytes bytes);
  Bytes max(Index from, Index to) const;
  // The last slot in [from, to] that holds more than `limit`; from - 1 when there is none.
  Index lastAbove(Index from, Index to, Bytes limit) const;
  // The first slot in [from, to] that holds more than `limit`; to + 1 when there is none.
  Index firstAbove(Index from, Index to, Bytes limit) const;

 private:
  struct Query;
  Bytes maxIn(std::size_t node, Index low, Index high, Index from, Index to) const;
  void addIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes bytes);
  Index lastIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const;
  Index firstIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const;
  void build(std::size_t node, Index low, Index high, const std::vector<Bytes>& values);

  Index size_;
  std::vector<Bytes> max_;    // of the node's range, with its own and its children's additions
  std::vector<Bytes> added_;  // to the whole range of the node, not yet in its children
};

}  // namespace dc::plan
