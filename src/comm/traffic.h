// Counts of collectives and of the bytes that this rank sends to others.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dc {

enum class Collective { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier, Exchange };

inline constexpr std::array<std::string_view, 6> kCollectiveNames = {"all_gather", "reduce_scatter", "all_reduce",
                                                                     "broadcast",  "barrier",        "exchange"};

// Written by the threads that communicate, read by any.
class Traffic {
 public:
  void count(Collective kind, std::int64_t bytes_sent) {
    auto& entry = entries_[static_cast<std::size_t>(kind)];
    entry.calls.fetch_add(1, std::memory_order_relaxed);
    entry.bytes.fetch_add(bytes_sent, std::memory_order_relaxed);
  }

  std::int64_t calls(Collective kind) const { return entries_[static_cast<std::size_t>(kind)].calls.load(); }
  std::int64_t bytes(Collective kind) const { return entries_[static_cast<std::size_t>(kind)].bytes.load(); }

  void clear() {
    for (auto& entry : entries_) {
      entry.calls = 0;
      entry.bytes = 0;
    }
  }

 private:
  struct Entry {
    std::atomic<std::int64_t> calls{0};
    std::atomic<std::int64_t> bytes{0};
  };
  std::array<Entry, kCollectiveNames.size()> entries_;
};

}  // namespace dc
