#include "deepcompile/plan/memory_tree.h"

#include <algorithm>
#include <limits>

namespace dc::plan {
namespace {
constexpr Bytes kLowest = std::numeric_limits<Bytes>::min() / 4;
// A pass over the whole tree costs as much as this part of its leaves in single additions.
constexpr std::size_t kPass = 8;
}  // namespace

MemoryTree::MemoryTree(const std::vector<Bytes>& values) : size_(static_cast<Index>(values.size())), most_(kLowest) {
  while (leaves_ < values.size()) {
    leaves_ *= 2;
  }
  max_.assign(2 * leaves_, kLowest);
  std::copy(values.begin(), values.end(), max_.begin() + static_cast<std::ptrdiff_t>(leaves_));
  for (const Bytes value : values) {
    most_ = std::max(most_, value);
  }
}

void MemoryTree::add(Index from, Index to, Bytes bytes) {
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from <= to && bytes != 0) {
    ++work_;
    new_.push_back({from, to, bytes});
    most_ += std::max<Bytes>(bytes, 0);
  }
}

// Brings what was noted into the tree.
void MemoryTree::settle() const {
  if (!has_inner_ || new_.size() > leaves_ / kPass) {
    addAll();
  } else {
    for (const Addition& one : new_) {
      addOne(one);
    }
  }
  new_.clear();
  most_ = max_[1];
}

void MemoryTree::addAll() const {
  if (has_inner_) {
    for (std::size_t node = 1; node < leaves_; ++node) {
      apply(2 * node, added_[node]);
      apply(2 * node + 1, added_[node]);
    }
  }
  added_.assign(leaves_, 0);
  std::vector<Bytes> change(static_cast<std::size_t>(size_) + 1, 0);
  for (const Addition& one : new_) {
    change[one.from] += one.bytes;
    change[one.to + 1] -= one.bytes;
  }
  Bytes sum = 0;
  for (Index slot = 0; slot < size_; ++slot) {
    sum += change[slot];
    max_[leaves_ + static_cast<std::size_t>(slot)] += sum;
  }
  for (std::size_t node = leaves_; node-- > 1;) {
    pull(node);
  }
  has_inner_ = true;
}

void MemoryTree::apply(std::size_t node, Bytes bytes) const {
  max_[node] += bytes;
  if (node < leaves_) {
    added_[node] += bytes;
  }
}

void MemoryTree::pull(std::size_t node) const {
  max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + added_[node];
}

// From the leaves to the root: the nodes that the range consists of lie beside the paths of its two ends, and the nodes
// on the paths are brought up to date on the way.
void MemoryTree::addOne(const Addition& one) const {
  std::size_t left = leaves_ + static_cast<std::size_t>(one.from);
  std::size_t right = leaves_ + static_cast<std::size_t>(one.to);
  apply(left, one.bytes);
  if (left != right) {
    apply(right, one.bytes);
  }
  for (; left / 2 != right / 2; left /= 2, right /= 2, pull(left), pull(right)) {
    if (left % 2 == 0) {
      apply(left + 1, one.bytes);
    }
    if (right % 2 == 1) {
      apply(right - 1, one.bytes);
    }
  }
  for (left /= 2; left > 0; left /= 2) {
    const Bytes before = max_[left];
    pull(left);
    if (max_[left] == before) {
      break;  // nor does anything above change
    }
  }
}

Bytes MemoryTree::max(Index from, Index to) const {
  ++work_;
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from > to) {
    return 0;
  }
  if (!new_.empty() || !has_inner_) {
    settle();
  }
  std::size_t left = leaves_ + static_cast<std::size_t>(from);
  std::size_t right = leaves_ + static_cast<std::size_t>(to);
  Bytes at_left = max_[left];
  Bytes at_right = max_[right];
  while (left / 2 != right / 2) {
    at_left = left % 2 == 0 ? std::max(at_left, max_[left + 1]) : at_left;
    at_right = right % 2 == 1 ? std::max(at_right, max_[right - 1]) : at_right;
    left /= 2;
    right /= 2;
    at_left += added_[left];
    at_right += added_[right];
  }
  Bytes most = std::max(at_left, at_right);
  for (left /= 2; left > 0; left /= 2) {
    most += added_[left];
  }
  return most;
}

bool MemoryTree::within(Index from, Index to, Bytes limit) const {
  ++work_;
  return atMost() <= limit || max(from, to) <= limit;
}

Index MemoryTree::lastAbove(Index from, Index to, Bytes limit) const {
  ++work_;
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from > to || most_ <= limit) {
    return from - 1;
  }
  settle();
  const Index found = lastIn(1, 0, static_cast<Index>(leaves_) - 1, from, to, limit);
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
  ++work_;
  from = std::max<Index>(from, 0);
  to = std::min(to, size_ - 1);
  if (from > to || most_ <= limit) {
    return to + 1;
  }
  settle();
  const Index found = firstIn(1, 0, static_cast<Index>(leaves_) - 1, from, to, limit);
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
