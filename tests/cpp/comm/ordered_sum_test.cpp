#include "deepcompile/comm/ordered_sum.h"

#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace dc {
namespace {

TEST(OrderedSum, AddsTheRowsFromTheFirstToTheLast) {
  // (1e8 + 1) - 1e8 is 0 in fp32 and (1e8 - 1e8) + 1 is 1: the order shows.
  const at::Tensor a = at::tensor(std::vector<float>{1e8F, 1e8F}).view({1, 2});
  const at::Tensor b = at::tensor(std::vector<float>{1, -1e8F}).view({1, 2});
  const at::Tensor c = at::tensor(std::vector<float>{-1e8F, 1}).view({1, 2});
  const at::Tensor sum = sumInRankOrder(at::cat({a, b, c}), false);
  EXPECT_EQ(sum[0].item<float>(), 0);
  EXPECT_EQ(sum[1].item<float>(), 1);
}

TEST(OrderedSum, SixteenBitTypesAreAddedInFloatAndRoundedOnce) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    // Each small term alone is lost beside the first; together they are not.
    const double one = dtype == at::kHalf ? 2048 : 256;
    const at::Tensor rows = at::ones({5, 1}, dtype);
    rows[0].fill_(one);
    const at::Tensor sum = sumInRankOrder(rows, false);
    EXPECT_EQ(sum.scalar_type(), dtype);
    EXPECT_EQ(sum.item<float>(), one + 4) << dtype;
  }
}

TEST(OrderedSum, TheAverageIsTakenBeforeTheRounding) {
  const at::Tensor rows = at::full({4, 1}, 60000, at::kHalf);  // the sum does not fit into 16 bits
  EXPECT_EQ(sumInRankOrder(rows, true).item<float>(), 60000);
}

TEST(OrderedSum, ComplexAndDoubleKeepTheirPrecision) {
  const at::Tensor rows = at::full({2, 3}, 1 + 1e-12, at::kDouble);
  EXPECT_TRUE(at::equal(sumInRankOrder(rows.clone(), false), rows[0] * 2));
  const at::Tensor complex = at::ones({2, 3}, at::kComplexFloat);
  EXPECT_TRUE(at::equal(sumInRankOrder(complex.clone(), true), complex[0]));
}

TEST(OrderedSum, ASplitOfTheColumnsGivesTheSameBits) {
  const at::Tensor rows = at::sin(at::arange(3 * 1001, at::kFloat)).view({3, 1001});
  const at::Tensor whole = sumInRankOrder(rows.clone(), true);
  const at::Tensor parts = at::cat(
      {sumInRankOrder(rows.narrow(1, 0, 13).clone(), true), sumInRankOrder(rows.narrow(1, 13, 988).clone(), true)});
  EXPECT_TRUE(at::equal(whole, parts));
}

TEST(OrderedSum, OneRowAndNoColumns) {
  EXPECT_TRUE(at::equal(sumInRankOrder(at::ones({1, 2}), true), at::ones({2})));
  EXPECT_EQ(sumInRankOrder(at::ones({3, 0}), true).numel(), 0);
}

}  // namespace
}  // namespace dc
