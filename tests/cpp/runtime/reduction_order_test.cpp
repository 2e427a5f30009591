#include "deepcompile/runtime/reduction_order.h"

#include <string>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

// "3 2 -1": gradients of 3 and 2, then 1 without one.
std::string text(const std::vector<ArrivedGradient>& ready) {
  std::string out;
  for (const ArrivedGradient& arrived : ready) {
    out += concat(out.empty() ? "" : " ", arrived.grad.defined() ? "" : "-", arrived.id);
  }
  return out;
}

std::string arrive(ReductionOrder& order, std::int64_t id) {
  std::vector<ArrivedGradient> ready;
  order.arrive(id, at::full({1}, id), ready);
  return text(ready);
}

std::string finish(ReductionOrder& order) {
  std::vector<ArrivedGradient> ready;
  order.finish(ready);
  return text(ready);
}

TEST(ReductionOrder, WhatArrivesInTheExpectedOrderGoesInAtOnce) {
  ReductionOrder order({3, 2, 1});
  EXPECT_EQ(arrive(order, 3), "3");
  EXPECT_EQ(arrive(order, 2), "2");
  EXPECT_TRUE(order.goesNow(1));
  EXPECT_EQ(arrive(order, 1), "1");
  EXPECT_EQ(finish(order), "");
}

TEST(ReductionOrder, WhatArrivesEarlyIsParkedUntilThoseBeforeItAreThere) {
  ReductionOrder order({3, 2, 1});
  EXPECT_FALSE(order.goesNow(1));
  EXPECT_EQ(arrive(order, 1), "");
  EXPECT_EQ(arrive(order, 2), "");
  EXPECT_TRUE(order.goesNow(3));
  EXPECT_EQ(arrive(order, 3), "3 2 1");
  EXPECT_EQ(finish(order), "");
}

TEST(ReductionOrder, MissingOnesGoInAsNoGradientInTheirPlace) {
  ReductionOrder order({4, 3, 2, 1});
  EXPECT_EQ(arrive(order, 3), "");
  EXPECT_EQ(arrive(order, 1), "");
  EXPECT_EQ(finish(order), "-4 3 -2 1");
}

TEST(ReductionOrder, AnExpectedRepeatHasAPlaceOfItsOwn) {
  ReductionOrder order({2, 1, 2});
  EXPECT_EQ(arrive(order, 2), "2");
  EXPECT_EQ(arrive(order, 2), "");
  EXPECT_EQ(arrive(order, 1), "1 2");
  order.begin();
  EXPECT_EQ(arrive(order, 2), "2");
  EXPECT_EQ(finish(order), "-1 -2");
}

TEST(ReductionOrder, WhatIsBeyondItsExpectedCountIsSurplusInOrderOfArrival) {
  ReductionOrder order({2, 1});
  EXPECT_EQ(arrive(order, 2), "2");
  EXPECT_FALSE(order.goesNow(2));
  EXPECT_FALSE(order.hasSurplus());
  EXPECT_EQ(arrive(order, 2), "");
  EXPECT_TRUE(order.hasSurplus());
  EXPECT_EQ(arrive(order, 7), "");
  EXPECT_EQ(arrive(order, 1), "1");
  EXPECT_EQ(finish(order), "");
  EXPECT_EQ(text(order.takeSurplus()), "2 7");
  EXPECT_FALSE(order.hasSurplus());
}

TEST(ReductionOrder, BeginForgetsTheLastBackward) {
  ReductionOrder order({2, 1});
  arrive(order, 1);
  arrive(order, 9);
  order.begin();
  EXPECT_TRUE(order.arrivals().empty());
  EXPECT_EQ(arrive(order, 2), "2");
  EXPECT_EQ(finish(order), "-1");
}

TEST(ReductionOrder, ArrivalsAreKeptInOrderWithTheirRepeats) {
  ReductionOrder order({1, 2});
  for (const int id : {2, 1, 2}) {
    arrive(order, id);
  }
  EXPECT_EQ(order.arrivals(), (std::vector<std::int64_t>{2, 1, 2}));
}

TEST(ReductionOrder, LearnsWhatWasSeenFollowedByWhatWasNot) {
  EXPECT_EQ(ReductionOrder::learn({2, 1, 2}, {4, 3, 2, 1}), (std::vector<std::int64_t>{2, 1, 2, 4, 3}));
  EXPECT_EQ(ReductionOrder::learn({}, {2, 1}), (std::vector<std::int64_t>{2, 1}));
}

}  // namespace
}  // namespace dc
