#include "deepcompile/runtime/reduce_bucket.h"

#include <future>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

Deadline later() { return deadlineAfter(Seconds(20)); }

TEST(ReduceBucket, IsFilledFromTheFrontWithSlicesOfOneBuffer) {
  ReduceBucket bucket(10, at::kFloat);
  const at::Tensor first = bucket.allocate(4);
  const at::Tensor second = bucket.allocate(6);
  EXPECT_EQ(first.numel(), 4);
  EXPECT_EQ(second.const_data_ptr<float>(), first.const_data_ptr<float>() + 4);
  EXPECT_TRUE(first.is_alias_of(bucket.getBuffer()));
  EXPECT_EQ(bucket.getOffset(), 10);
}

TEST(ReduceBucket, ShouldFlushOnlyWhenItHoldsSomethingAndTheNextDoesNotFit) {
  ReduceBucket bucket(10, at::kFloat);
  EXPECT_FALSE(bucket.shouldFlush(11)) << "an empty bucket has nothing to flush";
  bucket.allocate(4);
  EXPECT_FALSE(bucket.shouldFlush(6));
  EXPECT_TRUE(bucket.shouldFlush(7));
  bucket.reset();
  EXPECT_FALSE(bucket.shouldFlush(7));
}

TEST(ReduceBucket, CountsWhatItAdoptsTowardsItsSizeButNotTowardsItsMemory) {
  ReduceBucket bucket(10, at::kFloat);
  bucket.adopt(8);
  EXPECT_TRUE(bucket.shouldFlush(3));
  EXPECT_FALSE(bucket.shouldFlush(2));
  EXPECT_EQ(bucket.allocate(2).storage_offset(), 0);
  bucket.reset();
  EXPECT_FALSE(bucket.shouldFlush(10));
}

TEST(ReduceTask, TellsWhetherItsGradientWasWrittenToUntilItIsDropped) {
  const at::Tensor grad = at::zeros({4});
  ReduceTask task(0, grad, grad.view({-1}));
  EXPECT_FALSE(task.changed());
  grad.add_(1);
  EXPECT_TRUE(task.changed());
  task.dropGradient();
  EXPECT_FALSE(task.changed());
  EXPECT_FALSE(ReduceTask(0, at::Tensor(), grad).changed());
}

TEST(ReduceBucket, GrowsForAGradientThatIsLargerThanItAndNeverShrinks) {
  ReduceBucket bucket(4, at::kBFloat16);
  bucket.reserve(9);
  EXPECT_EQ(bucket.getSize(), 9);
  EXPECT_EQ(bucket.getBuffer().numel(), 9);
  EXPECT_EQ(bucket.getScalarType(), at::kBFloat16);
  bucket.reserve(5);
  EXPECT_EQ(bucket.getSize(), 9);
}

TEST(ReduceBucket, RefusesToGrowUnderWhatItHolds) {
  ReduceBucket bucket(4, at::kFloat);
  bucket.allocate(3);
  EXPECT_EQ(errorOf([&] { bucket.reserve(5); }), "a reduce bucket that holds 3 elements cannot grow from 4 to 5");
}

TEST(ReduceBucket, RefusesASliceThatDoesNotFitWithTheNumbers) {
  ReduceBucket bucket(4, at::kFloat);
  bucket.allocate(3);
  EXPECT_EQ(errorOf([&] { bucket.allocate(2); }), "a reduce bucket of 4 elements, 3 of them used, has no room for 2");
}

TEST(ReduceBucket, ASizeBelowOneIsRefused) {
  EXPECT_HAS(errorOf([] { ReduceBucket(0, at::kFloat); }), "0 elements");
  EXPECT_HAS(errorOf([] { DoubleBufferedReduceBucket(0, true); }), "initial_reduce_bucket_size is 0");
}

TEST(DoubleBufferedReduceBucket, CountsTheBytesOfAllBuckets) {
  DoubleBufferedReduceBucket buckets(10, true);
  EXPECT_EQ(buckets.bytes(), 0);
  buckets.getBuffer(at::kFloat)->allocate(1);
  buckets.getBuffer(at::kBFloat16)->reserve(20);
  EXPECT_EQ(buckets.bytes(), 10 * 4) << "nobody has used the other";
  buckets.getBuffer(at::kBFloat16)->allocate(1);
  EXPECT_EQ(buckets.bytes(), 10 * 4 + 20 * 2);
  buckets.clear();
  EXPECT_EQ(buckets.bytes(), 0);
}

TEST(ReduceTask, AnUndefinedGradientStandsForNone) {
  const at::Tensor slice = at::empty({2});
  ReduceTask with(3, at::ones({2}), slice);
  const ReduceTask without(4, at::Tensor(), slice);
  with.dropGradient();
  EXPECT_TRUE(with.hasGradient()) << "also after its memory was let go";
  EXPECT_FALSE(without.hasGradient());
  EXPECT_EQ(without.getDSId(), 4);
}

TEST(ReduceTask, DroppingTheGradientLetsItsMemoryGo) {
  at::Tensor gradient = at::ones({2});
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(gradient.getIntrusivePtr());
  ReduceTask task(3, std::move(gradient), at::empty({2}));
  EXPECT_FALSE(watched.expired());
  task.dropGradient();
  EXPECT_TRUE(watched.expired());
}

class Buckets : public ::testing::Test {
 protected:
  void swap(DoubleBufferedReduceBucket& buckets) { buckets.swap(at::kFloat, *reduce_, *copy_, later()); }

  const std::shared_ptr<Stream> reduce_ = makeCpuStream(CpuStreamMode::Worker, "reduce");
  const std::shared_ptr<Stream> copy_ = makeCpuStream(CpuStreamMode::Worker, "copy");
};

TEST_F(Buckets, EachDtypeHasABucketOfItsOwn) {
  DoubleBufferedReduceBucket buckets(8, true);
  EXPECT_NE(buckets.getBuffer(at::kFloat), buckets.getBuffer(at::kHalf));
  EXPECT_EQ(buckets.getBuffer(at::kHalf)->getScalarType(), at::kHalf);
}

TEST_F(Buckets, DoubleBufferingTakesTurnsBetweenTwo) {
  DoubleBufferedReduceBucket buckets(8, true);
  const auto first = buckets.getBuffer(at::kFloat);
  first->allocate(5);
  swap(buckets);
  const auto second = buckets.getBuffer(at::kFloat);
  EXPECT_NE(first, second);
  EXPECT_EQ(second->getOffset(), 0);
  swap(buckets);
  EXPECT_EQ(buckets.getBuffer(at::kFloat), first);
  EXPECT_EQ(first->getOffset(), 0);
}

TEST_F(Buckets, WithoutDoubleBufferingThereIsOne) {
  DoubleBufferedReduceBucket buckets(8, false);
  const auto first = buckets.getBuffer(at::kFloat);
  first->allocate(5);
  swap(buckets);
  EXPECT_EQ(buckets.getBuffer(at::kFloat), first);
  EXPECT_EQ(first->getOffset(), 0);
}

// How many flushes the copies may run ahead of a reduction that is still reading its bucket.
TEST_F(Buckets, ACopyWaitsForTheReductionThatStillReadsTheBucket) {
  for (const bool double_buffer : {false, true}) {
    DoubleBufferedReduceBucket buckets(8, double_buffer);
    std::promise<void> go;
    reduce_->run([wait = go.get_future().share()] { wait.wait(); });
    swap(buckets);
    if (double_buffer) {
      copy_->synchronize(later());  // the second bucket is free at once
      EXPECT_TRUE(buckets.getEvent(at::kFloat).passed());
      swap(buckets);
    }
    EXPECT_FALSE(buckets.getEvent(at::kFloat).passed());
    const Event copied = copy_->record();
    EXPECT_FALSE(copied.passed());
    go.set_value();
    copied.wait(later());
    EXPECT_TRUE(buckets.getEvent(at::kFloat).passed());
  }
}

}  // namespace
}  // namespace dc
