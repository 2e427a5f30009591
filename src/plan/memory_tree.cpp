#include "deepcompile/plan/memory_tree.h"

#include <algorithm>
#include <limits>

namespace dc::plan {
namespace {
constexpr Bytes kLowest = std::numeric_limits<Bytes>::min() / 4;
}

MemoryTree::MemoryTree(const std::vector<Bytes>& values) : size_(static_cast<Index>(values.size())) {
  std::size_t leaves = 1;
  while (leaves < values.size()) {
    leaves *= 2;
  }
  max_.assign(2 * leaves, kLowest);
  added_.assign(2 * leaves, 0);
  if (size_ > 0) {
    build(1, 0, size_ - 1, values);
  }
}

void MemoryTree::build(std::size_t node, Index low, Index high, const std::vector<Bytes>& values) {
  if (low == high) {
    max_[node] = values[low];
    return;
  }
  const Index middle = low + (high - low) / 2;
  build(2 * node, low, middle, values);
  build(2 * node + 1, middle + 1, high, values);
  max_[node] = std::max(max_[2 * node], max_[2 * node + 1]);
}

void MemoryTree::add(Index from, Index to, Bytes bytes) {
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from <= to && bytes != 0) {
    addIn(1, 0, size_ - 1, from, to, bytes);
  }
}

void MemoryTree::addIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes bytes) {
  if (from <= low && high <= to) {
    max_[node] += bytes;
    added_[node] += bytes;
    return;
  }
  const Index middle = low + (high - low) / 2;
  if (from <= middle) {
    addIn(2 * node, low, middle, from, to, bytes);
  }
  if (to > middle) {
    addIn(2 * node + 1, middle + 1, high, from, to, bytes);
  }
  max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + added_[node];
}

Bytes MemoryTree::max(Index from, Index to) const {
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  return from > to ? 0 : maxIn(1, 0, size_ - 1, from, to);
}

Bytes MemoryTree::maxIn(std::size_t node, Index low, Index high, Index from, Index to) const {
  if (from <= low && high <= to) {
    return max_[node];
  }
  const Index middle = low + (high - low) / 2;
  Bytes most = kLowest;
  if (from <= middle) {
    most = maxIn(2 * node, low, middle, from, to);
  }
  if (to > middle) {
    most = std::max(most, maxIn(2 * node + 1, middle + 1, high, from, to));
  }
  return most + added_[node];
}

Index MemoryTree::lastAbove(Index from, Index to, Bytes limit) const {
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from > to) {
    return from - 1;
  }
  const Index found = lastIn(1, 0, size_ - 1, from, to, limit);
  return found == kNone ? from - 1 : found;
}

Index MemoryTree::lastIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const {
  if (high < from || to < low || max_[node] <= limit) {
    return kNone;
  }
  if (low == high) {
    return low;
  }
  const Index middle = low + (high - low) / 2;
  const Bytes rest = limit - added_[node];
  const Index right = lastIn(2 * node + 1, middle + 1, high, from, to, rest);
  return right != kNone ? right : lastIn(2 * node, low, middle, from, to, rest);
}

Index MemoryTree::firstAbove(Index from, Index to, Bytes limit) const {
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from > to) {
    return to + 1;
  }
  const Index found = firstIn(1, 0, size_ - 1, from, to, limit);
  return found == kNone ? to + 1 : found;
}

Index MemoryTree::firstIn(std::size_t node, Index low, Index high, Index from, Index to, Bytes limit) const {
  if (high < from || to < low || max_[node] <= limit) {
    return kNone;
  }
  if (low == high) {
    return low;
  }
  const Index middle = low + (high - low) / 2;
  const Bytes rest = limit - added_[node];
  const Index left = firstIn(2 * node, low, middle, from, to, rest);
  return left != kNone ? left : firstIn(2 * node + 1, middle + 1, high, from, to, rest);
}

}  // namespace dc::plan
