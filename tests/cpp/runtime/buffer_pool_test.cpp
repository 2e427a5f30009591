#include "deepcompile/runtime/buffer_pool.h"

#include <future>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

// Counts what is allocated and says what was given back.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* block = new Block{this, std::vector<char>(bytes)};
    const std::lock_guard lock(mutex_);
    held_ += static_cast<std::int64_t>(bytes);
    ++allocations_;
    return {block->memory.data(), block, &free, c10::Device(c10::kCPU)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}

  std::int64_t held() const { return held_; }
  std::int64_t allocations() const { return allocations_; }

 private:
  struct Block {
    CountingAllocator* allocator;
    std::vector<char> memory;
  };
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      const std::lock_guard lock(block->allocator->mutex_);
      block->allocator->held_ -= static_cast<std::int64_t>(block->memory.size());
    }
    delete block;
  }
  std::mutex mutex_;
  std::int64_t held_ = 0;
  std::int64_t allocations_ = 0;
};

class BufferPoolTest : public ::testing::Test {
 protected:
  BufferPoolTest() { pool_.setLimit(0); }

  CountingAllocator allocator_;
  BufferPool pool_{&allocator_};
};

TEST_F(BufferPoolTest, WhereNothingIsKeptMemoryGoesBackWhenNobodyUsesIt) {
  pool_.give(pool_.take(1000));
  EXPECT_GT(allocator_.held(), 0);
  pool_.limitIdle(0);
  EXPECT_EQ(allocator_.held(), 0);
  Buffer one = pool_.take(1000);
  Buffer other = pool_.take(2000);
  pool_.give(std::move(one));
  EXPECT_EQ(allocator_.held(), pool_.live());
  EXPECT_EQ(pool_.idle(), 0);
  pool_.give(std::move(other));
  EXPECT_EQ(allocator_.held(), 0);
}

TEST_F(BufferPoolTest, NoMoreThanTheLimitLiesIdle) {
  pool_.limitIdle(2048);
  Buffer one = pool_.take(1024);
  Buffer two = pool_.take(1024);
  Buffer three = pool_.take(1024);
  pool_.give(std::move(one));
  pool_.give(std::move(two));
  EXPECT_EQ(pool_.idle(), 2048);
  pool_.give(std::move(three));
  EXPECT_EQ(pool_.idle(), 2048);
  EXPECT_EQ(allocator_.held(), 2048);
  pool_.limitIdle(1024);
  EXPECT_EQ(allocator_.held(), 1024);
}

TEST_F(BufferPoolTest, ABufferIsUsedAgainOnlyOnTheStreamThatItWasTakenOn) {
  pool_.setLimit(BufferPool::kInitialLimit);
  Buffer first = pool_.take(1000, /*stream=*/1);
  Buffer second = pool_.take(1000, /*stream=*/2);
  void* const of_first = first.memory.get();
  void* const of_second = second.memory.get();
  pool_.give(std::move(first));
  pool_.give(std::move(second));
  const Buffer third = pool_.take(1000, /*stream=*/3);
  EXPECT_NE(third.memory.get(), of_first);
  EXPECT_NE(third.memory.get(), of_second);
  EXPECT_EQ(pool_.take(1000, /*stream=*/1).memory.get(), of_first);
}

TEST_F(BufferPoolTest, WhatWasOnceInUseCanBeForgotten) {
  Buffer kept = pool_.take(1000);
  pool_.give(pool_.take(5000));
  pool_.forgetMost();
  EXPECT_EQ(allocator_.held(), pool_.live());
  pool_.give(std::move(kept));
  EXPECT_GT(pool_.idle(), 0);
  const Buffer other = pool_.take(2000);
  EXPECT_EQ(pool_.idle(), 0);  // room for no more than is in use
}

TEST_F(BufferPoolTest, APoolThatKeepsForGoodGivesNothingBackBeforeItIsAskedOrGoes) {
  {
    BufferPool pool(&allocator_, BufferPool::Keep::ForGood);
    pool.limitIdle(0);
    pool.give(pool.take(5000));
    pool.give(pool.take(1000));
    pool.forgetMost();
    pool.give(pool.take(5000));
    EXPECT_EQ(allocator_.allocations(), 2);
    EXPECT_EQ(allocator_.held(), pool.idle());
    pool.trim();
    EXPECT_EQ(allocator_.held(), 0);
    pool.give(pool.take(1000));
    EXPECT_GT(allocator_.held(), 0);
  }
  EXPECT_EQ(allocator_.held(), 0);
}

TEST_F(BufferPoolTest, ABufferThatWasGivenBackServesTheNextOfItsSizeWithoutTheAllocator) {
  Buffer buffer = pool_.take(1000);
  void* const memory = buffer.memory.get();
  pool_.give(std::move(buffer));
  EXPECT_EQ(pool_.take(1000).memory.get(), memory);
  EXPECT_EQ(allocator_.allocations(), 1);
  EXPECT_EQ(pool_.taken(), 2);
  EXPECT_EQ(pool_.reused(), 1);
}

TEST_F(BufferPoolTest, ABufferThatIsInUseIsNotHandedOutAgain) {
  const Buffer first = pool_.take(128);
  const Buffer second = pool_.take(128);
  EXPECT_NE(first.memory.get(), second.memory.get());
}

TEST_F(BufferPoolTest, NoBytesAreStillABufferOfItsOwn) {
  const Buffer buffer = pool_.take(0);
  EXPECT_NE(buffer.memory.get(), nullptr);
  EXPECT_GE(buffer.bytes, 1);
}

TEST_F(BufferPoolTest, TheNextUserLearnsWhatMustPassBeforeItWrites) {
  const auto stream = makeCpuStream(CpuStreamMode::Worker, "gather");
  std::promise<void> go;
  stream->run([wait = go.get_future().share()] { wait.wait(); });
  Buffer buffer = pool_.take(64);
  buffer.free_after = stream->record();
  pool_.give(std::move(buffer));
  const Buffer again = pool_.take(64);
  EXPECT_FALSE(again.free_after.passed());
  go.set_value();
  again.free_after.wait(deadlineAfter(Seconds(20)));
}

TEST_F(BufferPoolTest, HoldsNoMoreThanTheMostThatWasInUseAtOnce) {
  for (const std::int64_t bytes : {640, 64, 128, 512, 192, 640, 320, 64, 256}) {
    pool_.give(pool_.take(bytes));
    EXPECT_LE(allocator_.held(), 640);
    EXPECT_EQ(pool_.live(), 0);
    EXPECT_EQ(pool_.idle(), allocator_.held());
  }
}

TEST_F(BufferPoolTest, ALimitLetsItHoldMore) {
  pool_.setLimit(1024);
  pool_.give(pool_.take(512));
  pool_.give(pool_.take(448));
  EXPECT_EQ(allocator_.held(), 960);
  pool_.give(pool_.take(128));
  EXPECT_LE(allocator_.held(), 1024);
}

TEST_F(BufferPoolTest, TrimGivesAllIdleMemoryBackAndLeavesWhatIsInUse) {
  const Buffer used = pool_.take(128);
  pool_.give(pool_.take(256));
  pool_.trim();
  EXPECT_EQ(allocator_.held(), 128);
  EXPECT_EQ(pool_.idle(), 0);
  EXPECT_EQ(pool_.live(), 128);
}

TEST_F(BufferPoolTest, PeakIsTheMostInUseSinceTheCountsWereReset) {
  {
    Buffer a = pool_.take(128);
    Buffer b = pool_.take(256);
    pool_.give(std::move(a));
    pool_.give(std::move(b));
  }
  EXPECT_EQ(pool_.peak(), 384);
  pool_.resetCounts();
  EXPECT_EQ(pool_.peak(), 0);
  EXPECT_EQ(pool_.taken(), 0);
  pool_.give(pool_.take(128));
  EXPECT_EQ(pool_.peak(), 128);
}

TEST_F(BufferPoolTest, ThreadsMayTakeAndGiveAtTheSameTime) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i) {
        Buffer buffer = pool_.take(64 * (1 + (i + t) % 3));
        *static_cast<char*>(buffer.memory.get()) = static_cast<char>(t);
        pool_.give(std::move(buffer));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(pool_.live(), 0);
  EXPECT_EQ(pool_.taken(), 800);
}

// Memory that a gather still writes to must not go back to the allocator, whoever wants room.
class MemoryInFlight : public BufferPoolTest {
 protected:
  MemoryInFlight() {
    stream_->run([wait = go_.get_future().share()] { wait.wait(); });
    Buffer buffer = pool_.take(640);
    buffer.free_after = stream_->record();
    pool_.give(std::move(buffer));
  }
  ~MemoryInFlight() override { go_.set_value(); }

  std::promise<void> go_;
  const std::shared_ptr<Stream> stream_ = makeCpuStream(CpuStreamMode::Worker, "gather");
};

TEST_F(MemoryInFlight, IsNotFreedToMakeRoom) {
  const Buffer other = pool_.take(128);
  EXPECT_EQ(allocator_.held(), 640 + 128);
}

TEST_F(MemoryInFlight, IsNotFreedByTrim) {
  pool_.trim();
  EXPECT_EQ(allocator_.held(), 640);
}

}  // namespace
}  // namespace dc
