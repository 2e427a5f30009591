// Where slots lie: what makes it safe to write one without asking whether the peers have read what was there.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/shm/group.h"

namespace dc::shm {
namespace {

struct Placed {
  std::int64_t begin;
  std::int64_t end;
};

TEST(SlotArea, NoSlotLiesWhereOneOfTheThreeBeforeItDoes) {
  constexpr std::int64_t kLargest = 512 << 10;
  constexpr std::int64_t kBegin = 3 * kLine;
  std::mt19937_64 random(7);
  const auto upTo = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most)) + 1;
  };
  for (int trial = 0; trial < 200; ++trial) {
    SlotArea area(kBegin, kLargest);
    std::deque<Placed> last;
    for (int message = 0; message < 50; ++message) {
      const std::int64_t bytes = random() % 4 == 0 ? kLargest : upTo(kLargest);
      const bool is_long = random() % 2 == 0;
      for (std::int64_t slots = upTo(random() % 3 == 0 ? 40 : 4); slots > 0; --slots) {
        const std::int64_t begin = area.next(bytes, is_long);
        ASSERT_GE(begin, kBegin);
        ASSERT_LE(begin + bytes, area.end());
        for (const Placed& other : last) {
          ASSERT_TRUE(begin + bytes <= other.begin || other.end <= begin) << "trial " << trial;
        }
        last.push_back({begin, begin + bytes});
        if (last.size() > 3) {
          last.pop_front();
        }
      }
    }
  }
}

TEST(SlotArea, ALongMessageUsesLessOfIt) {
  constexpr std::int64_t kLargest = 512 << 10;
  constexpr std::int64_t kChunk = 256 << 10;
  const auto used = [&](bool is_long) {
    SlotArea area(0, kLargest);
    std::int64_t most = 0;
    for (int slot = 0; slot < 100; ++slot) {
      most = std::max(most, area.next(kChunk, is_long) + kChunk);
    }
    return most;
  };
  EXPECT_EQ(used(false), kSlots * kLargest);
  EXPECT_EQ(used(true), 4 * kLargest);
}

}  // namespace
}  // namespace dc::shm
