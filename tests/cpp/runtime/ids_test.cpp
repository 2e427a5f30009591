#include "deepcompile/runtime/ids.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

namespace dc {
namespace {

// On both sides of every boundary: of a word, of what is looked up by position, of the numbers.
const std::vector<std::int64_t> kIds = {0,
                                        1,
                                        63,
                                        64,
                                        65,
                                        kIdsByPosition - 1,
                                        kIdsByPosition,
                                        kIdsByPosition + 1,
                                        -1,
                                        std::numeric_limits<std::int64_t>::max(),
                                        std::numeric_limits<std::int64_t>::min()};

TEST(IdSet, HoldsWhatWasPutInAndNothingElse) {
  std::mt19937 random(1);
  IdSet set;
  std::unordered_set<std::int64_t> expected;
  for (int i = 0; i < 2000; ++i) {
    const std::int64_t id = kIds[random() % kIds.size()];
    if (random() % 2 == 0) {
      EXPECT_EQ(set.insert(id), expected.insert(id).second) << id;
    } else {
      EXPECT_EQ(set.erase(id), expected.erase(id) > 0) << id;
    }
    for (const std::int64_t other : kIds) {
      EXPECT_EQ(set.contains(other), expected.count(other) > 0) << other;
    }
    EXPECT_EQ(set.size(), expected.size());
    const std::vector<std::int64_t> listed = set.ids();
    EXPECT_EQ(std::unordered_set<std::int64_t>(listed.begin(), listed.end()), expected);
    EXPECT_EQ(listed.size(), expected.size());
  }
}

TEST(IdSet, IsEmptyWhenCleared) {
  IdSet set(kIds.begin(), kIds.end());
  EXPECT_EQ(set.size(), kIds.size());
  set.clear();
  EXPECT_EQ(set.size(), 0u);
  for (const std::int64_t id : kIds) {
    EXPECT_FALSE(set.contains(id)) << id;
  }
}

TEST(IdMap, WhatItHoldsStaysWhereItIsWhileMoreIsPutIn) {
  IdMap<std::string> map;
  std::unordered_map<std::int64_t, std::string*> places;
  for (const std::int64_t id : kIds) {
    EXPECT_EQ(map.find(id), nullptr);
    places[id] = &map.put(id, std::to_string(id));
  }
  for (const std::int64_t id : kIds) {
    EXPECT_EQ(map.find(id), places[id]);
    EXPECT_EQ(*map.find(id), std::to_string(id));
  }
  EXPECT_EQ(map.find(2), nullptr);
  EXPECT_EQ(map.put(64, "another"), "another");
  EXPECT_EQ(*map.find(64), "another");
}

}  // namespace
}  // namespace dc
