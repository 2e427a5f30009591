#include "deepcompile/runtime/recorder.h"

#include <gtest/gtest.h>

namespace dc {
namespace {

using Kind = RecordedOp::Kind;

std::shared_ptr<Timeline> timeline() { return std::make_shared<Timeline>(); }

TEST(Recorder, NothingIsKeptWhileItIsOff) {
  Recorder recorder(timeline());
  EXPECT_FALSE(recorder.mark());
  recorder.add(Kind::Read, 1, at::kFloat, 4, false, recorder.mark(), 0);
  recorder.release(1, at::kFloat, 4);
  EXPECT_TRUE(recorder.stop().ops.empty());
}

TEST(Recorder, OperationsKeepTheirOrderAndTimes) {
  const auto moments = timeline();
  Recorder recorder(moments);
  recorder.start();
  const std::int64_t before = Timeline::now();
  const auto start = recorder.mark();
  recorder.add(Kind::Gather, 7, at::kBFloat16, 20, false, start, 0);
  recorder.release(7, at::kBFloat16, 24);
  const auto [ops, ended] = recorder.stop();
  ASSERT_EQ(ops.size(), 2U);
  EXPECT_EQ(ops[0].kind, Kind::Gather);
  EXPECT_EQ(ops[0].id, 7);
  EXPECT_EQ(ops[0].dtype, at::kBFloat16);
  EXPECT_EQ(ops[0].bytes, 20);
  EXPECT_GE(ops[0].start, before);
  EXPECT_LE(ops[0].start, ops[0].end);
  EXPECT_LE(ops[0].end, ops[1].start);
  EXPECT_EQ(ops[1].kind, Kind::Release);
  EXPECT_EQ(ops[1].start, ops[1].end);
  EXPECT_LE(ops[1].end, ended);
  EXPECT_FALSE(recorder.recording());
  EXPECT_FALSE(moments->recording());
}

TEST(Recorder, WhatBeganBeforeTheRecordingIsLeftOut) {
  Recorder recorder(timeline());
  const auto before = recorder.mark();
  recorder.start();
  recorder.add(Kind::Reduce, 1, at::kFloat, 4, true, before);
  EXPECT_TRUE(recorder.stop().ops.empty());
}

TEST(Recorder, BackwardsCountMicroBatchesAndChangedShardsIterations) {
  Recorder recorder(timeline());
  recorder.start();
  const auto pass = [&](std::int64_t version) {
    recorder.add(Kind::Gather, 1, at::kFloat, 4, false, recorder.mark(), version);
    recorder.add(Kind::End, -1, at::kFloat, 0, true, recorder.mark());
  };
  pass(0);
  pass(0);
  pass(1);
  pass(1);
  std::vector<std::pair<int, int>> found;
  for (const RecordedOp& op : recorder.stop().ops) {
    if (op.kind == Kind::Gather) {
      found.emplace_back(op.iteration, op.micro);
    }
  }
  EXPECT_EQ(found, (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
}

TEST(Recorder, AReleaseBelongsToThePassOfTheOperationBeforeIt) {
  Recorder recorder(timeline());
  recorder.start();
  recorder.add(Kind::Gather, 1, at::kFloat, 4, true, recorder.mark(), 0);
  recorder.release(1, at::kFloat, 4);
  recorder.add(Kind::End, -1, at::kFloat, 0, true, recorder.mark());
  recorder.release(1, at::kFloat, 4);
  const auto ops = recorder.stop().ops;
  EXPECT_TRUE(ops[1].backward);
  EXPECT_FALSE(ops[3].backward);
}

TEST(Recorder, CallsOfCompiledGraphsStandBetweenTheOperationsAroundThem) {
  Recorder recorder(timeline());
  recorder.call(false);
  recorder.start();
  recorder.call(false);
  recorder.add(Kind::Gather, 1, at::kFloat, 4, false, recorder.mark(), 0);
  recorder.call(true);
  const auto ops = recorder.stop().ops;
  ASSERT_EQ(ops.size(), 3U);
  EXPECT_EQ(ops[0].kind, Kind::Call);
  EXPECT_FALSE(ops[0].backward);
  EXPECT_LE(ops[0].end, ops[1].start);
  EXPECT_EQ(ops[2].kind, Kind::Call);
  EXPECT_TRUE(ops[2].backward);
  EXPECT_LE(ops[1].end, ops[2].start);
}

TEST(Recorder, WhatIsDroppedIsForgottenWithItsSpans) {
  const auto moments = timeline();
  Recorder recorder(moments);
  recorder.start();
  recorder.add(Kind::Gather, 1, at::kFloat, 4, false, recorder.mark(), 0);
  moments->add(Timeline::Kind::Gather, 1, 4, moments->mark());
  recorder.drop();
  EXPECT_FALSE(recorder.recording());
  EXPECT_FALSE(moments->recording());
  EXPECT_TRUE(moments->take().empty());
  recorder.start();
  EXPECT_TRUE(recorder.stop().ops.empty());
}

TEST(Recorder, CompiledCodeIsNoticedOnlyWhileRecording) {
  Recorder recorder(timeline());
  recorder.noteCompiled();
  recorder.start();
  EXPECT_FALSE(recorder.sawCompiled());
  recorder.noteCompiled();
  EXPECT_TRUE(recorder.sawCompiled());
}

}  // namespace
}  // namespace dc
