// Memory by slot, with fast answers to "does this fit from here to there": range add, range maximum
// and the nearest slot that is too full, each in O(log n).
//
// Most answers need no tree: where all of memory is surely below the limit, it fits. So additions are only noted, with
// a bound on what they can make of the maximum, until an answer depends on where they are.
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
  // No slot holds more; a quick answer, and not always the least.
  Bytes atMost() const { return most_ > 0 ? most_ : 0; }
  // max(from, to) <= limit
  bool within(Index from, Index to, Bytes limit) const;
  // The last slot in [from, to] that holds more than `limit`; from - 1 when there is none.
  Index lastAbove(Index from, Index to, Bytes limit) const;
  // The first slot in [from, to] that holds more than `limit`; to + 1 when there is none.
  Index firstAbove(Index from, Index to, Bytes limit) const;
  // Additions and questions so far.
  std::size_t work() const { return work_; }

 private:
  struct Addition {
    Index from;
    Index to;
    Bytes bytes;
  };

  void settle() const;
  void addAll() const;
  void addOne(const Addition& one) const;
  void apply(std::size_t node, Bytes bytes) const;
  void pull(std::size_t node) const;
  Index lastIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const;
  Index firstIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const;

  Index size_;
  std::size_t leaves_ = 1;             // a power of two; node 1 is the root, the leaves are the last nodes
  mutable bool has_inner_ = false;     // nodes above the leaves; without them nothing is added to them either
  mutable std::vector<Bytes> max_;     // of the node's range, with its own and its children's additions
  mutable std::vector<Bytes> added_;   // to the whole range of an inner node, not yet in its children
  mutable std::vector<Addition> new_;  // not in the tree yet
  mutable Bytes most_;                 // no slot holds more
  mutable std::size_t work_ = 0;
};

}  // namespace dc::plan
