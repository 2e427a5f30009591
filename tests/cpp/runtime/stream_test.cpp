#include "deepcompile/runtime/stream.h"

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

Deadline soon() { return deadlineAfter(Seconds(0.05)); }
Deadline later() { return deadlineAfter(Seconds(20)); }

class StreamOfMode : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  const std::shared_ptr<Stream> stream_ = makeCpuStream(GetParam(), "gather");
};

TEST_P(StreamOfMode, RunsWorkInTheOrderInWhichItWasGiven) {
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    stream_->run([&order, i] { order.push_back(i); });
  }
  stream_->synchronize(later());
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_P(StreamOfMode, WorkGivenByManyThreadsNeverRunsAtTheSameTime) {
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  int sum = 0;  // not atomic: a race would be found
  std::vector<std::thread> givers;
  for (int i = 0; i < 4; ++i) {
    givers.emplace_back([&] {
      for (int j = 0; j < 50; ++j) {
        stream_->run([&] {
          most = std::max(most.load(), ++running);
          ++sum;
          --running;
        });
      }
    });
  }
  for (std::thread& giver : givers) {
    giver.join();
  }
  stream_->synchronize(later());
  EXPECT_EQ(sum, 200);
  EXPECT_EQ(most, 1);
}

TEST_P(StreamOfMode, AnEventOfAnIdleStreamHasPassed) {
  EXPECT_TRUE(stream_->record().passed());
  EXPECT_EQ(errorOf([&] { stream_->record().wait(soon()); }), "");
}

TEST_P(StreamOfMode, AnErrorSurfacesAtTheWaitAndNotWhereTheWorkWasGiven) {
  EXPECT_EQ(errorOf([&] { stream_->run([] { fail("the cable was cut"); }); }), "");
  const Event event = stream_->record();
  EXPECT_FALSE(event.trivial());
  EXPECT_EQ(errorOf([&] { event.wait(later()); }), "the cable was cut");
  EXPECT_EQ(errorOf([&] { event.wait(later()); }), "the cable was cut") << "each wait hears of it";
}

TEST_P(StreamOfMode, AfterAnErrorLaterWorkIsSkippedAndEveryLaterEventCarriesTheFirstError) {
  bool ran = false;
  stream_->run([] { fail("first"); });
  stream_->run([&ran] {
    ran = true;
    fail("second");
  });
  EXPECT_EQ(errorOf([&] { stream_->synchronize(later()); }), "first");
  EXPECT_FALSE(ran);
}

TEST_P(StreamOfMode, AnEventRecordedBeforeTheErrorDoesNotCarryIt) {
  stream_->run([] {});
  const Event before = stream_->record();
  stream_->run([] { fail("too late for the event"); });
  EXPECT_NE(errorOf([&] { stream_->synchronize(later()); }), "");
  EXPECT_EQ(errorOf([&] { before.wait(later()); }), "");
}

TEST_P(StreamOfMode, AStreamThatWaitsForAFailedEventFailsWithItsError) {
  const auto other = makeCpuStream(GetParam(), "copy");
  other->run([] { fail("the cable was cut"); });
  stream_->wait(other->record(), later());
  bool ran = false;
  stream_->run([&ran] { ran = true; });
  EXPECT_EQ(errorOf([&] { stream_->synchronize(later()); }), "the cable was cut");
  EXPECT_FALSE(ran);
}

TEST_P(StreamOfMode, AnEventOutlivesItsStream) {
  Event good;
  Event bad;
  {
    const auto gone = makeCpuStream(GetParam(), "gather");
    good = gone->record();
    gone->run([] { fail("the cable was cut"); });
    bad = gone->record();
    errorOf([&] { gone->synchronize(later()); });
  }
  EXPECT_EQ(errorOf([&] { good.wait(soon()); }), "");
  EXPECT_EQ(errorOf([&] { bad.wait(soon()); }), "the cable was cut");
}

TEST_P(StreamOfMode, WhatWorkCapturesIsLetGoAfterItHasRun) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = owned;
  stream_->run([owned = std::move(owned)] {});
  stream_->run([] {});
  stream_->synchronize(later());
  EXPECT_TRUE(watched.expired());
}

INSTANTIATE_TEST_SUITE_P(Modes, StreamOfMode, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

TEST(InlineStream, RunsWorkOnTheCallingThreadAtOnce) {
  const auto stream = makeCpuStream(CpuStreamMode::Inline, "copy");
  std::thread::id thread;
  stream->run([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
  EXPECT_TRUE(stream->record().trivial());
}

// A piece of work that waits for the test, so that a stream is busy for as long as the test likes.
struct Busy {
  explicit Busy(Stream& stream) {
    stream.run([go = released.get_future().share()] { go.wait(); });
  }
  ~Busy() { release(); }
  void release() {
    if (!std::exchange(done, true)) {
      released.set_value();
    }
  }
  std::promise<void> released;
  bool done = false;
};

TEST(WorkerStream, TheCallerDoesNotWaitForTheWork) {
  const auto stream = makeCpuStream(CpuStreamMode::Worker, "gather");
  Busy busy(*stream);
  const Event event = stream->record();
  EXPECT_FALSE(event.passed());
  busy.release();
  event.wait(later());
  EXPECT_TRUE(event.passed());
}

TEST(WorkerStream, AWaitPastItsDeadlineNamesTheStreamAndWhatToDo) {
  const auto stream = makeCpuStream(CpuStreamMode::Worker, "gather");
  const Busy busy(*stream);
  const std::string error = errorOf([&] { stream->synchronize(soon()); });
  EXPECT_HAS(error, "the gather stream did not finish its work before the deadline");
  EXPECT_HAS(error, "`timeout`");
}

TEST(WorkerStream, AStreamThatWaitsForAnEventStartsAfterIt) {
  const auto first = makeCpuStream(CpuStreamMode::Worker, "copy");
  const auto second = makeCpuStream(CpuStreamMode::Worker, "reduce");
  int value = 0;
  int seen = -1;
  Busy busy(*first);
  first->run([&] { value = 7; });
  second->wait(first->record(), later());
  second->run([&] { seen = value; });
  EXPECT_FALSE(second->record().passed());
  busy.release();
  second->synchronize(later());
  EXPECT_EQ(seen, 7);
}

TEST(WorkerStream, AStreamWhoseWaitPassesTheDeadlineIsPoisoned) {
  const auto first = makeCpuStream(CpuStreamMode::Worker, "copy");
  const auto second = makeCpuStream(CpuStreamMode::Worker, "reduce");
  const Busy busy(*first);
  second->wait(first->record(), soon());
  bool ran = false;
  second->run([&ran] { ran = true; });
  EXPECT_HAS(errorOf([&] { second->synchronize(later()); }), "the copy stream did not finish");
  EXPECT_FALSE(ran);
}

TEST(WorkerStream, DestructionDropsWorkThatHasNotStarted) {
  std::atomic<bool> ran{false};
  auto stream = makeCpuStream(CpuStreamMode::Worker, "gather");
  Busy busy(*stream);
  // The stream is kept busy until the work behind is dropped, with what it owns.
  std::shared_ptr<void> owned(nullptr, [&busy](void*) { busy.release(); });
  const std::weak_ptr<void> watched = owned;
  stream->run([&ran, owned = std::move(owned)] { ran = true; });
  stream.reset();
  EXPECT_FALSE(ran);
  EXPECT_TRUE(watched.expired());
}

TEST(ChooseCpuStreamMode, TheEnvironmentDecidesUnlessItSaysAuto) {
  EXPECT_EQ(chooseCpuStreamMode("inline", false, 1, 1, 64), CpuStreamMode::Inline);
  EXPECT_EQ(chooseCpuStreamMode("worker", true, 8, 8, 1), CpuStreamMode::Worker);
}

TEST(ChooseCpuStreamMode, AutoTakesAWorkerUnlessItWouldSpinOnACoreThatComputes) {
  EXPECT_EQ(chooseCpuStreamMode("auto", false, 2, 3, 1), CpuStreamMode::Worker);
  EXPECT_EQ(chooseCpuStreamMode("auto", true, 2, 3, 8), CpuStreamMode::Worker);
  EXPECT_EQ(chooseCpuStreamMode("auto", true, 2, 3, 7), CpuStreamMode::Inline);
}

}  // namespace
}  // namespace dc
