// Sets and maps of parameter ids. Users choose the ids, and nearly all number them from zero. Such ids are looked up by
// position, without a hash or a division, because every operator does several lookups. Not synchronized.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace dc {

// Ids from this number on, and negative ones, are looked up by hash, so that a single large id costs no memory.
constexpr std::int64_t kIdsByPosition = 1 << 16;

inline bool byPosition(std::int64_t id) { return static_cast<std::uint64_t>(id) < kIdsByPosition; }

class IdSet {
 public:
  IdSet() = default;
  template <typename Iterator>
  IdSet(Iterator begin, Iterator end) {
    for (; begin != end; ++begin) {
      insert(*begin);
    }
  }

  bool contains(std::int64_t id) const {
    if (!byPosition(id)) [[unlikely]] {
      return others_.count(id) > 0;
    }
    return wordOf(id) < words_.size() && (words_[wordOf(id)] & bitOf(id)) != 0;
  }

  // True if it was added.
  bool insert(std::int64_t id) {
    if (!byPosition(id)) [[unlikely]] {
      return others_.insert(id).second;
    }
    if (wordOf(id) >= words_.size()) {
      words_.resize(wordOf(id) + 1);
    }
    std::uint64_t& word = words_[wordOf(id)];
    const bool added = (word & bitOf(id)) == 0;
    word |= bitOf(id);
    return added;
  }

  // True if it was removed.
  bool erase(std::int64_t id) {
    if (!contains(id)) {
      return false;
    }
    if (byPosition(id)) [[likely]] {
      words_[wordOf(id)] &= ~bitOf(id);
    } else {
      others_.erase(id);
    }
    return true;
  }

  void clear() {
    words_.clear();
    others_.clear();
  }

  std::size_t size() const {
    std::size_t count = others_.size();
    for (const std::uint64_t word : words_) {
      count += static_cast<std::size_t>(std::popcount(word));
    }
    return count;
  }

  // Ids below kIdsByPosition in ascending order, then the others in no order.
  std::vector<std::int64_t> ids() const {
    std::vector<std::int64_t> all;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t word = words_[i]; word != 0; word &= word - 1) {
        all.push_back(static_cast<std::int64_t>(i) * 64 + std::countr_zero(word));
      }
    }
    all.insert(all.end(), others_.begin(), others_.end());
    return all;
  }

 private:
  static std::size_t wordOf(std::int64_t id) { return static_cast<std::size_t>(id) / 64; }
  static std::uint64_t bitOf(std::int64_t id) { return std::uint64_t{1} << (static_cast<std::uint64_t>(id) % 64); }

  std::vector<std::uint64_t> words_;
  std::unordered_set<std::int64_t> others_;
};

// Addresses of values are stable until they are replaced or the map is destroyed.
template <typename T>
class IdMap {
 public:
  // Null if there is none.
  T* find(std::int64_t id) const {
    if (byPosition(id)) [[likely]] {
      return static_cast<std::size_t>(id) < by_position_.size() ? by_position_[static_cast<std::size_t>(id)].get()
                                                                : nullptr;
    }
    const auto found = others_.find(id);
    return found == others_.end() ? nullptr : found->second.get();
  }

  // Inserts or replaces.
  T& put(std::int64_t id, T value) {
    auto made = std::make_unique<T>(std::move(value));
    T& result = *made;
    if (!byPosition(id)) {
      others_[id] = std::move(made);
      return result;
    }
    if (static_cast<std::size_t>(id) >= by_position_.size()) {
      by_position_.resize(static_cast<std::size_t>(id) + 1);
    }
    by_position_[static_cast<std::size_t>(id)] = std::move(made);
    return result;
  }

 private:
  std::vector<std::unique_ptr<T>> by_position_;
  std::unordered_map<std::int64_t, std::unique_ptr<T>> others_;
};

}  // namespace dc
