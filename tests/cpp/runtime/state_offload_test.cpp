#include "deepcompile/runtime/state_offload.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

class StateOffloadTest : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  std::int64_t out() const { return context_->stats.bytes_offloaded; }
  std::int64_t back() const { return context_->stats.bytes_reloaded; }

  const std::shared_ptr<Context> context_ = std::make_shared<Context>(testing::configOfTests(), 1, 2);
  const std::shared_ptr<Stream> out_ = makeCpuStream(GetParam(), "offload");
  const std::shared_ptr<Stream> in_ = makeCpuStream(GetParam(), "reload");
  const std::shared_ptr<HostCopies> copies_ = std::make_shared<HostCopies>(at::kCPU, 1 << 20);
  StateOffload states_{at::kCPU, out_, in_, copies_, context_};
};

TEST_P(StateOffloadTest, AStateIsTheSameTensorWithTheSameValuesWhereverItIs) {
  at::Tensor average = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor square = at::full({6}, 2.0, at::kBFloat16);
  const void* const first = average.data_ptr();
  states_.set(7, {average, square}, "w");
  states_.move({.leave = {7}});
  states_.move({.free = {7}});
  EXPECT_EQ(states_.bytesAway(), 36);
  EXPECT_NE(average.data_ptr(), first);
  EXPECT_TRUE(at::equal(average, at::arange(6, at::kFloat).view({2, 3})));
  const void* const host = average.data_ptr();
  states_.move({.fetch = {7}});
  states_.require({7});
  EXPECT_EQ(states_.bytesAway(), 0);
  EXPECT_NE(average.data_ptr(), host);
  average.add_(1);
  EXPECT_TRUE(at::equal(average, at::arange(1, 7, at::kFloat).view({2, 3})));
  EXPECT_TRUE(at::equal(square, at::full({6}, 2.0, at::kBFloat16)));
  EXPECT_EQ(out(), 36);
  EXPECT_EQ(back(), 36);
}

TEST_P(StateOffloadTest, WhatIsRequiredIsThereHoweverFarItHasGone) {
  at::Tensor state = at::zeros({1000});
  states_.set(1, {state}, "w");
  for (int round = 0; round < 4; ++round) {  // here, leaving, on the host, returning
    if (round > 0) {
      states_.move({.leave = {1}});
    }
    if (round > 1) {
      states_.move({.free = {1}});
    }
    if (round > 2) {
      states_.move({.fetch = {1}});
    }
    states_.require({1});
    state.add_(1);
    EXPECT_EQ(state.min().item<float>(), round + 1);
    EXPECT_EQ(states_.bytesAway(), 0);
  }
  EXPECT_EQ(out(), 3 * 4000);
  EXPECT_EQ(back(), 2 * 4000);  // what was still here when it was required did not travel back
}

TEST_P(StateOffloadTest, MovesThatAreRepeatedOrUnknownDoNothing) {
  at::Tensor state = at::ones({10});
  states_.set(1, {state}, "w");
  states_.move({.free = {1, 2}});  // has not started to leave; is not known
  states_.move({.leave = {1, 1, 2}});
  states_.move({.free = {1}});
  states_.move({.leave = {1}});
  states_.move({.fetch = {1, 1, 2}});
  states_.require({1, 2});
  EXPECT_EQ(out(), 40);
  EXPECT_EQ(back(), 40);
  EXPECT_EQ(state.sum().item<float>(), 10);
}

TEST_P(StateOffloadTest, WhatIsOnItsWayBackTurnsRoundWithoutAnotherCopy) {
  at::Tensor state = at::full({1 << 14}, 3.0);
  states_.set(1, {state}, "w");
  states_.move({.leave = {1}});
  states_.move({.free = {1}});
  const void* const host = state.data_ptr();
  states_.move({.fetch = {1}});
  states_.move({.leave = {1}});
  states_.move({.free = {1}});
  EXPECT_EQ(states_.bytesAway(), 4 << 14);
  EXPECT_EQ(state.data_ptr(), host);
  EXPECT_EQ(out(), 4 << 14);
  states_.require({1});
  EXPECT_EQ(state.min().item<float>(), 3);
}

TEST_P(StateOffloadTest, NothingReturnsBeforeItMay) {
  at::Tensor state = at::ones({10});
  states_.set(1, {state}, "w");
  states_.move({.leave = {1}});
  states_.move({.free = {1}});
  states_.allowReturns(false);
  states_.move({.fetch = {1}});
  EXPECT_EQ(back(), 0);
  EXPECT_EQ(states_.bytesAway(), 40);
  states_.allowReturns(true);
  states_.move({.fetch = {1}});
  EXPECT_EQ(back(), 40);
}

TEST_P(StateOffloadTest, AfterSettlingTheHostReadsEverything) {
  at::Tensor leaving = at::full({1 << 14}, 3.0);
  at::Tensor returning = at::full({1 << 14}, 5.0);
  states_.set(1, {leaving}, "a");
  states_.set(2, {returning}, "b");
  states_.move({.leave = {1, 2}});
  states_.move({.free = {2}});
  states_.move({.fetch = {2}});
  states_.settle();
  EXPECT_EQ(leaving.min().item<float>(), 3);
  EXPECT_EQ(returning.min().item<float>(), 5);
  EXPECT_EQ(states_.bytesAway(), 4 << 14);
}

TEST_P(StateOffloadTest, OtherTensorsForAParameterTakeThePlaceOfThoseBefore) {
  at::Tensor before = at::ones({10});
  at::Tensor after = at::full({10}, 2.0);
  states_.set(1, {before}, "w");
  states_.move({.leave = {1}});
  states_.set(1, {after}, "w");
  EXPECT_EQ(states_.bytesAway(), 0);
  EXPECT_EQ(before.sum().item<float>(), 10);
  states_.move({.leave = {1}});
  states_.set(1, {after}, "w");  // the same: still on its way
  states_.move({.free = {1}});
  EXPECT_EQ(states_.bytesAway(), 40);
  states_.set(1, {}, "w");
  EXPECT_EQ(states_.bytesAway(), 0);
  EXPECT_EQ(after.sum().item<float>(), 20);
}

TEST_P(StateOffloadTest, HostMemoryThatIsUsedUpIsAnErrorAndTheStatesStayOnTheDevice) {
  at::Tensor first = at::ones({100 << 10});
  at::Tensor second = at::ones({200 << 10});
  states_.set(1, {first, second}, "w");
  EXPECT_HAS(errorOf([&] { states_.move({.leave = {1}}); }), "offload_limit");
  states_.move({.free = {1}});
  EXPECT_EQ(states_.bytesAway(), 0);
  states_.require({1});
  EXPECT_EQ(first.sum().item<float>(), 100 << 10);
}

TEST_P(StateOffloadTest, AnErrorOfACopyNamesTheParameterWhereItIsWaitedFor) {
  states_.set(1, {at::ones({2})}, "w");
  out_->run([] { fail("the host has no memory"); });
  states_.move({.leave = {1}});
  EXPECT_EQ(errorOf([&] { states_.move({.free = {1}}); }), "the host has no memory");
}

TEST_P(StateOffloadTest, StatesOfAnotherDeviceAreRefusedByTheNameOfTheirParameter) {
  const at::Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
  EXPECT_HAS(errorOf([&] { states_.set(1, {meta}, "layers.0.w"); }), "'layers.0.w' is on meta");
  EXPECT_HAS(errorOf([&] { states_.set(1, {at::ones({2}), meta}, "w"); }), "they move together (rank 1 of 2)");
}

INSTANTIATE_TEST_SUITE_P(Modes, StateOffloadTest, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
