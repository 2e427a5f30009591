#include "deepcompile/runtime/param.h"

#include <future>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/storage_guard.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

DSParam sharded(at::Tensor shard, at::Tensor gradient = at::Tensor()) {
  return DSParam(3, {4, 5}, std::move(shard), std::move(gradient), true, 0, false);
}

TEST(Param, IsTrainedWhileItHasAPlaceForItsGradient) {
  DSParam param = sharded(at::zeros({10}, at::kBFloat16));
  EXPECT_FALSE(param.trainable());
  param.setGradBuffer(at::zeros({10}));
  EXPECT_TRUE(param.trainable());
  EXPECT_EQ(param.getReduceDtype(), at::kFloat) << "that of the buffer";
  EXPECT_EQ(param.gradMemory().numel(), 10);
  param.setGradBuffer(at::Tensor());
  EXPECT_FALSE(param.trainable());
  EXPECT_FALSE(param.gradMemory().defined());
}

TEST(Param, DescribesItselfByNameIdShapeAndDtype) {
  DSParam param = sharded(at::zeros({10}, at::kBFloat16));
  EXPECT_EQ(param.describe(), "parameter (id 3, shape [4, 5], BFloat16)");
  const auto before = param.label();
  param.setName("layer.weight");
  EXPECT_EQ(param.describe(), "parameter 'layer.weight' (id 3, shape [4, 5], BFloat16)");
  EXPECT_EQ(*before, "parameter (id 3, shape [4, 5], BFloat16)") << "work in flight keeps its text";
}

TEST(Param, AnUndefinedOrEmptyGradientBufferOfAShardMarksItFrozen) {
  EXPECT_TRUE(sharded(at::zeros({10}), at::zeros({10})).trainable());
  EXPECT_FALSE(sharded(at::zeros({10}), at::zeros({0})).trainable());
  EXPECT_FALSE(sharded(at::zeros({10})).trainable());
}

TEST(Param, AnEmptyGradientBufferOfAWholeParameterOnlyMeansThatAnotherRankOwnsIt) {
  const auto whole = [](at::Tensor gradient) {
    return DSParam(1, {4}, at::zeros({4}), std::move(gradient), false, 0, false);
  };
  EXPECT_TRUE(whole(at::zeros({0})).trainable());
  EXPECT_FALSE(whole(at::Tensor()).trainable());
}

TEST(Param, ReducesInTheDtypeOfItsGradientBufferUnlessTold) {
  DSParam param = sharded(at::zeros({10}, at::kBFloat16), at::zeros({10}));
  EXPECT_EQ(param.getDtype(), at::kBFloat16);
  EXPECT_EQ(param.getReduceDtype(), at::kFloat);
  param.setReduceDtype(at::kDouble);
  EXPECT_EQ(param.getReduceDtype(), at::kDouble);
}

TEST(Param, TheSizeOfAShardedGradientIncludesThePadding) {
  DSParam param(1, {5}, at::zeros({3}), at::zeros({3}), true, 0, false);
  param.setOwners({{0, 3}, {3, 6}});
  EXPECT_EQ(param.numel(), 5);
  EXPECT_EQ(param.getPaddedNumel(), 6);
}

TEST(GradMemory, ThatWasLetGoIsTakenAnewAndWhoHoldsTheOldGradientKeepsIt) {
  DSParam param = sharded(at::arange(10, at::kFloat));
  param.setGradBuffer(at::full({10}, 3.0));
  const at::Tensor kept = param.getGradBuffer().view({2, 5});
  param.letGradMemoryGo();
  EXPECT_FALSE(param.hasGradMemory());
  EXPECT_TRUE(param.trainable());
  EXPECT_EQ(param.getGradBuffer().numel(), 10);
  param.letGradMemoryGo();
  param.gradMemory().fill_(4.0);
  EXPECT_TRUE(param.hasGradMemory());
  EXPECT_TRUE(at::equal(param.getGradBuffer(), at::full({10}, 4.0)));
  EXPECT_TRUE(at::equal(kept, at::full({2, 5}, 3.0)));
}

TEST(GradMemory, ThatWasLetGoTakesNoneAlsoAfterSomebodyHasResizedWhatWasEmpty) {
  DSParam param = sharded(at::arange(10, at::kFloat));
  param.setGradBuffer(at::full({10}, 3.0));
  param.letGradMemoryGo();
  const c10::Storage empty = param.getGradBuffer().storage();
  at::Tensor resized = param.getGradBuffer().alias();
  param.gradMemory().fill_(4.0);
  resized.resize_({20}).fill_(5.0);
  EXPECT_GT(empty.nbytes(), 0);
  param.letGradMemoryGo();
  EXPECT_FALSE(param.hasGradMemory());
  EXPECT_TRUE(at::equal(resized, at::full({20}, 5.0)));
}

class Offload : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  void useStreams(DSParam& param, double timeout = 20) {
    param.setOffload(offload_stream_, reload_stream_, std::make_shared<HostCopies>(at::kCPU, 0), timeout);
  }

  const std::shared_ptr<Stream> offload_stream_ = makeCpuStream(GetParam(), "offload");
  const std::shared_ptr<Stream> reload_stream_ = makeCpuStream(GetParam(), "reload");
  at::Tensor shard_ = at::arange(10, at::kFloat);
};

TEST_P(Offload, AReloadBringsTheSameBytesIntoTheSameTensor) {
  DSParam param = sharded(shard_);
  useStreams(param);
  for (int round = 0; round < 3; ++round) {
    param.offload();
    EXPECT_TRUE(param.isOffloaded());
    param.reload();
    EXPECT_FALSE(param.isOffloaded());
    EXPECT_TRUE(param.getDSTensor().is_same(shard_));
    EXPECT_TRUE(at::equal(shard_, at::arange(10, at::kFloat) + round));
    shard_.add_(1);
  }
}

TEST_P(Offload, ReadingTheShardThroughTheParameterBringsItBack) {
  DSParam param = sharded(shard_);
  useStreams(param);
  param.offload();
  EXPECT_TRUE(at::equal(param.getDSTensor(), at::arange(10, at::kFloat)));
  EXPECT_FALSE(param.isOffloaded());
}

TEST_P(Offload, TheTensorOfAnOffloadedParameterSaysWhyItCannotBeRead) {
  if (!Unguardable<c10::StorageImpl>) {
    GTEST_SKIP() << "this PyTorch cannot take a guard off a storage";
  }
  DSParam param = sharded(shard_);
  useStreams(param);
  param.setName("w");
  param.offload();
  EXPECT_HAS(errorOf([&] { shard_.const_data_ptr<float>(); }),
             "parameter 'w' (id 3, shape [4, 5], Float) is offloaded to host memory; call reload_parameter");
  EXPECT_HAS(errorOf([&] { shard_.sum(); }), "is offloaded to host memory");
  param.getDSTensor();
  EXPECT_EQ(shard_.sum().item<float>(), 45);
}

TEST_P(Offload, OffloadingOrReloadingTwiceIsOffloadingOrReloadingOnce) {
  DSParam param = sharded(shard_);
  useStreams(param);
  param.offload();
  param.offload();
  param.reload();
  param.reload();
  EXPECT_TRUE(at::equal(param.getDSTensor(), at::arange(10, at::kFloat)));
}

TEST_P(Offload, DoesNotCountAsAChangeOfTheShard) {
  DSParam param = sharded(shard_);
  useStreams(param);
  const auto version = shard_._version();
  param.offload();
  param.reload();
  EXPECT_EQ(param.getDSTensor()._version(), version);
}

TEST_P(Offload, AShardThatIsAViewIsRefusedWithBothSizes) {
  DSParam param = sharded(at::zeros({20}).narrow(0, 5, 10));
  useStreams(param);
  EXPECT_EQ(
      errorOf([&] { param.offload(); }),
      "parameter (id 3, shape [4, 5], Float) cannot be offloaded: its shard of 40 bytes is a view into a storage of "
      "80 bytes; register a shard that owns its storage");
  EXPECT_FALSE(param.isOffloaded());
  EXPECT_TRUE(at::equal(param.getDSTensor(), at::zeros({10})));
}

TEST_P(Offload, AnEmptyShardStaysWhereItIs) {
  DSParam param = sharded(at::zeros({0}));
  useStreams(param);
  param.offload();
  EXPECT_EQ(param.getDSTensor().numel(), 0);
}

TEST_P(Offload, AnErrorOfTheCopySurfacesWhereTheShardIsRead) {
  DSParam param = sharded(shard_);
  useStreams(param);
  offload_stream_->run([] { fail("the host has no memory"); });
  EXPECT_EQ(errorOf([&] { param.offload(); }), "");
  EXPECT_EQ(errorOf([&] { param.reload(); }), "");
  EXPECT_EQ(errorOf([&] { param.getDSTensor(); }), "the host has no memory");
}

TEST_P(Offload, WithoutStreamsBothDirectionsAreDoneAtOnce) {
  DSParam param = sharded(shard_);
  param.offload();
  param.reload();
  EXPECT_TRUE(at::equal(shard_, at::arange(10, at::kFloat)));
}

INSTANTIATE_TEST_SUITE_P(Modes, Offload, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

TEST(OffloadWithWorkers, AReloadThatNeverComesIsADeadlineAndNotAHang) {
  const auto offload = makeCpuStream(CpuStreamMode::Worker, "offload");
  const auto reload = makeCpuStream(CpuStreamMode::Worker, "reload");
  std::promise<void> go;
  offload->run([wait = go.get_future().share()] { wait.wait(); });
  DSParam param = sharded(at::arange(10, at::kFloat));
  param.setOffload(offload, reload, std::make_shared<HostCopies>(at::kCPU, 0), 0.05);
  param.offload();
  EXPECT_HAS(errorOf([&] { param.getDSTensor(); }), "stream did not finish its work before the deadline");
  go.set_value();
}

}  // namespace
}  // namespace dc
