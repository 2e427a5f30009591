#include "deepcompile/runtime/step_trace.h"

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

using Kind = TraceEntry::Kind;

void read(StepTrace& trace, std::int64_t id, std::int64_t version, bool backward = false) {
  const auto start = trace.moment();
  const auto launched = trace.moment();
  trace.addRead({.kind = Kind::Read, .id = id, .bytes = 4, .backward = backward}, start, launched, version);
}

void endBackward(StepTrace& trace) { trace.add({.kind = Kind::EndBackward, .backward = true}, trace.moment()); }

std::vector<std::pair<int, int>> placesOfReads(const StepTrace::Taken& taken) {
  std::vector<std::pair<int, int>> found;
  for (const TraceEntry& entry : taken.entries) {
    if (entry.kind == Kind::Read) {
      found.emplace_back(entry.iteration, entry.micro);
    }
  }
  return found;
}

TEST(StepTrace, NothingIsKeptWithoutAReader) {
  StepTrace trace;
  EXPECT_FALSE(trace.moment());
  read(trace, 1, 0);
  trace.addInstant({.kind = Kind::BeginGraph});
  EXPECT_TRUE(trace.stop(trace.start()).entries.empty());
  EXPECT_FALSE(trace.on());
}

TEST(StepTrace, EntriesKeepTheirOrderAndTimes) {
  StepTrace trace;
  const auto reader = trace.start(/*releases=*/true);
  const std::int64_t before = StepTrace::now();
  const auto start = trace.moment();
  const auto launched = trace.moment();
  trace.addRead({Kind::Read, 7, at::kBFloat16, 20, false, true}, start, launched, 0);
  trace.addInstant({Kind::Release, 7, at::kBFloat16, 24});
  const auto [entries, ended, compiled] = trace.stop(reader);
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].id, 7);
  EXPECT_EQ(entries[0].dtype, at::kBFloat16);
  EXPECT_EQ(entries[0].bytes, 20);
  EXPECT_TRUE(entries[0].gathers);
  EXPECT_GE(entries[0].start, before);
  EXPECT_LE(entries[0].start, entries[0].launched);
  EXPECT_LE(entries[0].launched, entries[0].end);
  EXPECT_LE(entries[0].end, entries[1].start);
  EXPECT_EQ(entries[1].kind, Kind::Release);
  EXPECT_EQ(entries[1].launched, -1);
  EXPECT_EQ(entries[1].start, entries[1].end);
  EXPECT_LE(entries[1].end, ended);
  EXPECT_FALSE(compiled);
}

TEST(StepTrace, WhatBeganBeforeTheTraceIsLeftOut) {
  StepTrace trace;
  const auto before = trace.moment();
  const auto reader = trace.start();
  trace.add({.kind = Kind::Gradient, .id = 1, .backward = true}, before);
  EXPECT_TRUE(trace.stop(reader).entries.empty());
}

TEST(StepTrace, EachReaderGetsWhatWasLoggedSinceItBegan) {
  StepTrace trace;
  const auto first = trace.start();
  read(trace, 1, 0);
  const auto second = trace.start();
  read(trace, 2, 0);
  EXPECT_EQ(trace.stop(first).entries.size(), 2U);
  EXPECT_TRUE(trace.on());
  read(trace, 3, 0);
  const auto entries = trace.stop(second).entries;
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].id, 2);
  EXPECT_EQ(entries[1].id, 3);
  EXPECT_FALSE(trace.on());
  EXPECT_TRUE(trace.stop(trace.start()).entries.empty());
  EXPECT_THROW(trace.stop(second), Error);
}

TEST(StepTrace, ADroppedReaderLeavesTheOthersWhatTheyRead) {
  StepTrace trace;
  const auto first = trace.start();
  const auto second = trace.start();
  read(trace, 1, 0);
  trace.drop(first);
  EXPECT_EQ(trace.stop(second).entries.size(), 1U);
}

TEST(StepTrace, AReaderThatIsNeverStoppedDoesNotKeepOthersFromReading) {
  StepTrace trace;
  const auto forgotten = trace.start();
  for (std::size_t i = 0; i < StepTrace::kMostEntries; ++i) {
    trace.addInstant({.kind = Kind::BeginGraph});
  }
  const auto reader = trace.start();
  read(trace, 1, 0);
  read(trace, 2, 0);
  EXPECT_EQ(trace.stop(reader).entries.size(), 2U);
  EXPECT_EQ(trace.stop(forgotten).entries.size(), StepTrace::kMostEntries);
  EXPECT_FALSE(trace.on());
}

TEST(StepTrace, BackwardsCountMicroBatchesAndChangedShardsIterations) {
  StepTrace trace;
  const auto reader = trace.start();
  for (const std::int64_t version : {0, 0, 1, 1}) {
    read(trace, 1, version);
    endBackward(trace);
  }
  EXPECT_EQ(placesOfReads(trace.stop(reader)), (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
}

TEST(StepTrace, EachReaderCountsIterationsAndMicroBatchesFromItsFirstEntry) {
  StepTrace trace;
  const auto first = trace.start();
  read(trace, 1, 0);
  endBackward(trace);
  const auto second = trace.start();
  read(trace, 1, 0);
  endBackward(trace);
  read(trace, 1, 1);
  EXPECT_EQ(placesOfReads(trace.stop(second)), (std::vector<std::pair<int, int>>{{0, 0}, {1, 0}}));
  EXPECT_EQ(placesOfReads(trace.stop(first)), (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {1, 0}}));
}

TEST(StepTrace, AReleaseBelongsToThePassOfTheEventBeforeItAndIsLoggedWhereItIsWanted) {
  StepTrace trace;
  const auto without = trace.start();
  read(trace, 1, 0, /*backward=*/true);
  trace.addInstant({.kind = Kind::Release, .id = 1});
  EXPECT_FALSE(trace.wantsReleases());
  const auto with = trace.start(/*releases=*/true);
  EXPECT_TRUE(trace.wantsReleases());
  trace.addInstant({.kind = Kind::Release, .id = 1});
  endBackward(trace);
  trace.addInstant({.kind = Kind::Release, .id = 1});
  const auto entries = trace.stop(with).entries;
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_TRUE(entries[0].backward);
  EXPECT_FALSE(entries[2].backward);
  EXPECT_FALSE(trace.wantsReleases());
  EXPECT_EQ(trace.stop(without).entries.size(), 4U);
}

TEST(StepTrace, ChannelsDoNotSayInWhichPassTheProgramIs) {
  StepTrace trace;
  const auto reader = trace.start(/*releases=*/true);
  read(trace, 1, 0, /*backward=*/true);
  trace.add({.kind = Kind::Gather, .id = 1}, trace.moment());
  trace.addInstant({.kind = Kind::Release, .id = 1});
  EXPECT_TRUE(trace.stop(reader).entries.back().backward);
}

TEST(StepTrace, CompiledCodeIsNoticedByThoseWhoReadMeanwhile) {
  StepTrace trace;
  trace.noteCompiledCode();
  const auto first = trace.start();
  trace.noteCompiledCode();
  read(trace, 1, 0);
  const auto second = trace.start();
  EXPECT_FALSE(trace.stop(second).compiled_code);
  EXPECT_TRUE(trace.stop(first).compiled_code);
}

}  // namespace
}  // namespace dc
