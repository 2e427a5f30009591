#include "deepcompile/runtime/gathered.h"

#include <cmath>

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

class Gathered : public ::testing::Test {
 protected:
  at::Tensor make(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat, std::int64_t bytes = 100) {
    return makeGathered(pool_, pool_->take(bytes), GatherKey{7, 3, dtype, 5}, shape, at::kCPU);
  }

  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>(c10::GetCPUAllocator());
};

TEST_F(Gathered, HasTheTrueShapeOverThePaddedBuffer) {
  const at::Tensor tensor = make({2, 5});
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{2, 5}));
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_GE(tensor.storage().nbytes(), 100u);
  tensor.fill_(2);
  EXPECT_EQ(tensor.sum().item<float>(), 20);
}

TEST_F(Gathered, ItAndItsViewsKnowWhoseTheyAreAlsoAfterTheRelease) {
  const at::Tensor tensor = make({2, 5}, at::kBFloat16);
  const at::Tensor view = tensor.t();
  for (int i = 0; i < 2; ++i) {
    for (const at::Tensor& one : {tensor, view}) {
      const auto key = gatherKeyOf(one);
      ASSERT_TRUE(key);
      EXPECT_EQ(key->graph_id, 7);
      EXPECT_EQ(key->id, 3);
      EXPECT_EQ(key->dtype, at::kBFloat16);
      EXPECT_EQ(key->version, 5u);
    }
    releaseStorage(tensor, "released", false);
  }
}

TEST_F(Gathered, OtherTensorsHaveNoKey) {
  EXPECT_FALSE(gatherKeyOf(at::ones({2})));
  EXPECT_FALSE(gatherKeyOf(at::Tensor()));
  EXPECT_FALSE(gatherKeyOf(make({2}).clone()));
}

TEST_F(Gathered, TheMemoryReturnsToThePoolWithTheLastTensorOverIt) {
  at::Tensor tensor = make({2, 5});
  at::Tensor view = tensor.t();
  tensor = at::Tensor();
  EXPECT_EQ(pool_->live(), 128);
  view = at::Tensor();
  EXPECT_EQ(pool_->live(), 0);
  EXPECT_EQ(pool_->idle(), 128);
}

TEST_F(Gathered, AReleaseFreesTheMemoryUnderLivingTensorsAndOnlyOnce) {
  const at::Tensor tensor = make({2, 5});
  const at::Tensor view = tensor.t();
  releaseStorage(tensor, "first", false);
  EXPECT_EQ(pool_->live(), 0);
  EXPECT_EQ(view.storage().nbytes(), 0u);
  const Buffer other = pool_->take(100);
  releaseStorage(view, "second", false);
  EXPECT_EQ(pool_->live(), 128) << "the memory belongs to someone else by now";
  EXPECT_HAS(errorOf([&] { view.const_data_ptr<float>(); }), "first");
}

TEST_F(Gathered, ReadingAReleasedTensorThrowsTheMessage) {
  const at::Tensor tensor = make({2, 5});
  const at::Tensor view = tensor.narrow(0, 1, 1);
  releaseStorage(tensor, "parameter 'w' is read after its release", false, ReleasedSize::Nominal);
  EXPECT_HAS(errorOf([&] { tensor.sum(); }), "parameter 'w' is read after its release");
  EXPECT_HAS(errorOf([&] { view.const_data_ptr<float>(); }), "parameter 'w' is read after its release");
}

TEST_F(Gathered, ViewsCanBeTakenOfAReleasedTensorThatKeepsItsNominalSize) {
  const at::Tensor tensor = make({2, 5});
  const std::size_t bytes = tensor.storage().nbytes();
  releaseStorage(tensor, "released", false, ReleasedSize::Nominal);
  EXPECT_EQ(tensor.storage().nbytes(), bytes);
  EXPECT_EQ(errorOf([&] { tensor.view({10}); }), "");
}

TEST_F(Gathered, PoisonTurnsWhatARawPointerStillSeesIntoNaN) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor tensor = make({2, 5}, dtype);
    tensor.fill_(1);
    void* const memory = tensor.mutable_data_ptr();
    releaseStorage(tensor, "released", true);
    Buffer again = pool_->take(100);
    ASSERT_EQ(again.memory.get(), memory);
    const at::Tensor seen = at::from_blob(memory, {10}, at::TensorOptions().dtype(dtype));
    EXPECT_TRUE(at::isnan(seen).all().item<bool>()) << dtype;
    pool_->give(std::move(again));
  }
}

TEST_F(Gathered, ThePoolHearsWhatMustPassBeforeTheMemoryIsWrittenAgain) {
  const auto stream = makeCpuStream(CpuStreamMode::Worker, "gather");
  stream->run([] {});
  at::Tensor tensor = make({2, 5});
  setFreeAfter(tensor, stream->record());
  tensor = at::Tensor();
  EXPECT_FALSE(pool_->take(100).free_after.trivial());
}

}  // namespace
}  // namespace dc
