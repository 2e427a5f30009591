#include "deepcompile/base/text.h"

#include <vector>

#include <gtest/gtest.h>

namespace dc {
namespace {

TEST(Text, JoinPutsTheDelimiterBetweenElements) {
  EXPECT_EQ(join_as_str(std::vector<int>{1, 2, 3}), "1,2,3");
  EXPECT_EQ(join_as_str(std::vector<int>{1, 2}, " | "), "1 | 2");
  EXPECT_EQ(join_as_str(std::vector<int>{}), "");
}

TEST(Text, JoinCutsAtTheGivenLength) {
  EXPECT_EQ(join_as_str(std::vector<int>{10, 20, 30}, ",", 4), "10,2...");
  EXPECT_EQ(join_as_str(std::vector<int>{10, 20}, ",", 5), "10,20");
}

TEST(Text, ProductOfDimensionsIs64BitAndOneForAScalar) {
  EXPECT_EQ(productDim(std::vector<int64_t>{}), 1u);
  EXPECT_EQ(productDim(std::vector<int64_t>{3, 0, 5}), 0u);
  EXPECT_EQ(productDim(std::vector<int64_t>{1 << 20, 1 << 20}), std::size_t{1} << 40);
}

TEST(Text, HasKeyLooksUpTheKey) {
  const std::unordered_map<int, int> map = {{1, 2}};
  EXPECT_TRUE(hasKey(map, 1));
  EXPECT_FALSE(hasKey(map, 2));
}

}  // namespace
}  // namespace dc
