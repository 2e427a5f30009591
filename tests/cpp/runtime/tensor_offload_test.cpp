#include "deepcompile/runtime/tensor_offload.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

class TensorOffloadTest : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  const std::shared_ptr<Context> context_ = std::make_shared<Context>(testing::configOfTests(), 1, 2);
  const std::shared_ptr<Stream> out_ = makeCpuStream(GetParam(), "offload");
  const std::shared_ptr<Stream> in_ = makeCpuStream(GetParam(), "reload");
  const std::shared_ptr<HostCopies> copies_ = std::make_shared<HostCopies>(at::kCPU, 1 << 20);
  TensorOffload offload_{out_, in_, copies_, context_};
};

TEST_P(TensorOffloadTest, ATensorComesBackWithItsValuesShapeAndStrides) {
  const at::Tensor tensor = at::arange(12, at::kDouble).view({3, 4}).t();
  const at::Tensor host = offload_.offload(tensor, 5);
  offload_.waitOffload(5);
  EXPECT_TRUE(at::equal(host, tensor));
  EXPECT_FALSE(host.is_alias_of(tensor));
  const at::Tensor back = offload_.reload(host, 5);
  offload_.waitReload(5);
  EXPECT_TRUE(at::equal(back, tensor));
  EXPECT_EQ(back.strides(), tensor.strides());
  EXPECT_FALSE(back.is_alias_of(host));
  EXPECT_EQ(context_->stats.bytes_offloaded, 96);
  EXPECT_EQ(context_->stats.bytes_reloaded, 96);
}

TEST_P(TensorOffloadTest, AReloadWaitsForTheOffloadByItself) {
  const at::Tensor host = offload_.offload(at::ones({1 << 16}), 1);
  const at::Tensor back = offload_.reload(host, 1);
  offload_.waitReload(1);
  EXPECT_EQ(back.sum().item<float>(), 1 << 16);
}

TEST_P(TensorOffloadTest, TheCopyOwnsTheTensorUntilItIsDone) {
  at::Tensor host;
  for (int i = 0; i < 20; ++i) {
    host = offload_.offload(at::full({1 << 14}, i), i);
  }
  offload_.waitOffload(19);
  EXPECT_EQ(host.min().item<float>(), 19);
}

TEST_P(TensorOffloadTest, WhatIsOffloadedAgainUnderTheSameIdIsTheNewTensor) {
  offload_.offload(at::ones({2}), 1);
  const at::Tensor host = offload_.offload(at::full({3}, 2.0), 1);
  EXPECT_HAS(errorOf([&] { offload_.waitReload(1); }), "tensor 1 is not being reloaded");
  const at::Tensor back = offload_.reload(host, 1);
  offload_.waitReload(1);
  EXPECT_TRUE(at::equal(back, at::full({3}, 2.0)));
}

TEST_P(TensorOffloadTest, TheMemoryOfACopyThatNobodyHoldsServesTheNextOneOnceItsReloadIsDone) {
  std::vector<at::Tensor> back;
  for (int i = 0; i < 20; ++i) {
    const at::Tensor host = offload_.offload(at::full({1 << 14}, i, at::kFloat), i);
    back.push_back(offload_.reload(host, i));
  }
  for (int i = 0; i < 20; ++i) {
    offload_.waitReload(i);
    EXPECT_EQ(back[static_cast<std::size_t>(i)].min().item<float>(), i);
    EXPECT_EQ(back[static_cast<std::size_t>(i)].max().item<float>(), i);
  }
  EXPECT_EQ(copies_->pool().taken(), 20);
  EXPECT_EQ(copies_->pool().reused(), 19);
}

TEST_P(TensorOffloadTest, MoreThanTheLimitIsAnErrorThatNamesTheKeyAndLeavesTheRestUsable) {
  at::Tensor host = offload_.offload(at::ones({200 << 10}), 1);
  EXPECT_EQ(errorOf([&] { offload_.offload(at::ones({100 << 10}), 2); }),
            "offloading needs 409600 bytes of host memory, and 819200 of the 1048576 bytes that config key "
            "'offload_limit' allows are in use; raise it, or offload less at a time");
  offload_.waitOffload(1);
  EXPECT_EQ(host.sum().item<float>(), 200 << 10);
  host = at::Tensor();
  host = offload_.offload(at::ones({100 << 10}), 2);
  offload_.waitOffload(2);
  EXPECT_EQ(host.sum().item<float>(), 100 << 10);
}

TEST_P(TensorOffloadTest, AnUnknownIdIsAnErrorThatNamesOperationIdAndRank) {
  EXPECT_EQ(errorOf([&] { offload_.waitOffload(4); }),
            "wait_offload: no tensor with id 4 was offloaded in this graph (rank 1 of 2)");
  EXPECT_HAS(errorOf([&] { offload_.reload(at::ones({1}), 4); }), "reload_tensor: no tensor with id 4");
  EXPECT_HAS(errorOf([&] { offload_.waitReload(4); }), "wait_reload: no tensor with id 4");
}

TEST_P(TensorOffloadTest, NothingThatAutogradRecordsIsLeftOnTheCopies) {
  const at::Tensor tensor = at::ones({2}).set_requires_grad(true);
  const at::Tensor host = offload_.offload(tensor, 1);
  offload_.waitOffload(1);
  EXPECT_FALSE(host.requires_grad());
}

TEST_P(TensorOffloadTest, AnErrorSurfacesAtTheWaitThatDependsOnIt) {
  const at::Tensor before = offload_.offload(at::ones({2}), 1);
  out_->run([] { fail("the host has no memory"); });
  const at::Tensor host = offload_.offload(at::ones({2}), 2);
  offload_.reload(host, 2);
  EXPECT_EQ(errorOf([&] { offload_.waitOffload(2); }), "the host has no memory");
  EXPECT_EQ(errorOf([&] { offload_.waitReload(2); }), "the host has no memory");
}

INSTANTIATE_TEST_SUITE_P(Modes, TensorOffloadTest, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
