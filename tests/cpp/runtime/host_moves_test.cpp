#include "deepcompile/runtime/host_moves.h"

#include <future>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

// A stream whose work waits until the test lets it run, as that of a device does which is behind the host.
class HostMovesTest : public ::testing::Test {
 protected:
  HostMovesTest() {
    stream_->run([gate = gate_.get_future().share()] { gate.wait(); });
  }
  void run() {
    gate_.set_value();
    stream_->synchronize(deadlineAfter(Seconds(20)));
  }

  Context context_{testing::configOfTests(), 0, 1};
  HostCopies copies_{at::kCPU, 0};
  std::promise<void> gate_;
  const std::shared_ptr<Stream> stream_ = makeCpuStream(CpuStreamMode::Worker, "copies");
  const Stream::Describe what_ = [] { return std::string("a copy"); };
};

TEST_F(HostMovesTest, TheWorkHoldsTheTensorThatItWrites) {
  Moved moved = copyToDevice(at::ones({8}), at::kCPU, Holder::Work, Event(), *stream_, context_, what_);
  EXPECT_EQ(moved.tensor.storage().use_count(), 1);
  EXPECT_GT(moved.tensor.use_count(), 1u);
  run();
  EXPECT_TRUE(at::equal(moved.tensor, at::ones({8})));
}

TEST_F(HostMovesTest, WhereTheCallerHoldsItNobodyElseDoes) {
  const at::Tensor source = at::arange(12, at::kFloat).view({3, 4}).t();
  const Moved to_host = copyToHost(source, Holder::Caller, *stream_, copies_, context_, what_);
  const Moved back = copyToDevice(to_host.tensor, at::kCPU, Holder::Caller, to_host.done, *stream_, context_, what_);
  for (const at::Tensor& tensor : {source, back.tensor}) {
    EXPECT_EQ(tensor.use_count(), 2u);  // this loop's own, and the one that it was made from
  }
  EXPECT_EQ(back.tensor.storage().use_count(), 1);
  run();
  EXPECT_TRUE(at::equal(back.tensor, source));
  EXPECT_EQ(back.tensor.strides(), source.strides());
}

}  // namespace
}  // namespace dc
