#include "deepcompile/runtime/follower.h"

#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using Kind = ProgramEvent::Kind;
using Keys = std::vector<CopyKey>;

CopyKey key(std::int64_t id) { return {id, at::kFloat}; }
ProgramEvent read(std::int64_t id) { return {key(id), Kind::Read, false}; }
ProgramEvent saved(std::int64_t id) { return {key(id), Kind::Read, true}; }
ProgramEvent group(std::int64_t id) { return {key(id), Kind::Group, false}; }

// Forward 1 2 3, backward 3 2 1; 2 is started with 1, 3 stays for the backward.
StepSchedule threeLayers() {
  return {{read(1), false, {{key(1), key(2)}}}, {read(2), false, {{key(3)}}},  {read(3), true, {}},
          {saved(3), false, {{key(2)}}},        {saved(2), false, {{key(1)}}}, {saved(1), false, {}}};
}

class Replay : public ::testing::Test {
 protected:
  ScheduleFollower make(std::vector<StepSchedule> schedules, std::unordered_set<std::int64_t> leaves = {},
                        std::unordered_set<std::int64_t> persistent = {}) {
    return ScheduleFollower(
        std::move(schedules), std::move(leaves), std::move(persistent),
        [this](const std::string& text) { agreed.push_back(text); }, [](std::int64_t id) { return concat("w", id); });
  }

  // All steps of a cycle.
  std::vector<ScheduleFollower::Step> run(ScheduleFollower& follower, const std::vector<ProgramEvent>& reads,
                                          std::unordered_set<std::int64_t> current = {}) {
    follower.begin(std::move(current));
    std::vector<ScheduleFollower::Step> steps;
    for (const ProgramEvent& access : reads) {
      steps.push_back(follower.next(access));
    }
    dropped_at_end = follower.end();
    return steps;
  }

  std::vector<std::string> agreed;
  Keys dropped_at_end;
};

TEST_F(Replay, ThePlanIsFollowedWithoutAWordToTheOthers) {
  auto follower = make({threeLayers()});
  const auto steps = run(follower, {read(1), read(2), read(3), saved(3), saved(2), saved(1)});
  EXPECT_EQ(steps[0].gathers, (std::vector<Keys>{{key(1), key(2)}}));
  EXPECT_FALSE(steps[0].keep);
  EXPECT_EQ(steps[1].gathers, (std::vector<Keys>{{key(3)}}));
  EXPECT_TRUE(steps[2].keep);
  EXPECT_FALSE(steps[3].keep);
  EXPECT_TRUE(dropped_at_end.empty());
  EXPECT_TRUE(agreed.empty());
  EXPECT_EQ(follower.cycles(), 1);
  EXPECT_EQ(follower.divergences(), 0);
}

TEST_F(Replay, ASkippedLayerIsAgreedOnAndItsCopyDropped) {
  auto follower = make({threeLayers()});
  const auto steps = run(follower, {read(1), read(3), saved(3), saved(1)});
  ASSERT_EQ(agreed.size(), 2U);
  EXPECT_EQ(agreed[0], "read 1 was 'w3' (forward) where order 0 has 'w2' (forward)");
  EXPECT_EQ(agreed[1], "read 3 was 'w1' (backward) where order 0 has 'w2' (backward)");
  EXPECT_EQ(steps[1].drop, Keys{key(2)});                      // it was started for the layer that was skipped
  EXPECT_EQ(steps[1].gathers, (std::vector<Keys>{{key(3)}}));  // what the skipped layer would have started
  EXPECT_EQ(steps[3].drop, Keys{key(2)});
  EXPECT_EQ(follower.divergences(), 1);  // one iteration
  const auto divergences = follower.takeDivergences();
  ASSERT_EQ(divergences.size(), 1U);
  EXPECT_EQ(divergences[0].difference, agreed[0]);
  EXPECT_EQ(divergences[0].events, (std::vector<ProgramEvent>{read(1), read(3), saved(3), saved(1)}));
}

TEST_F(Replay, AnAdditionalReadIsGatheredOnDemandAndTheOrderGoesOn) {
  auto follower = make({threeLayers()});
  const auto steps = run(follower, {read(1), read(9), read(2), read(3), saved(3), saved(2), saved(1)});
  EXPECT_TRUE(steps[1].followed);
  EXPECT_TRUE(steps[1].gathers.empty());
  EXPECT_FALSE(steps[1].keep);
  EXPECT_TRUE(steps[3].keep);
  EXPECT_EQ(agreed.size(), 1U);
  EXPECT_EQ(follower.divergences(), 1);
}

TEST_F(Replay, AnAdditionalReadLeavesACopyThatALaterReadNeeds) {
  auto follower = make({threeLayers()});
  const auto steps = run(follower, {read(1), read(2), read(3), read(3), saved(3), saved(2), saved(1)});
  EXPECT_TRUE(steps[3].keep);
}

TEST_F(Replay, AnIterationThatEndsEarlyDropsWhatWasStartedAhead) {
  auto follower = make({threeLayers()});
  run(follower, {read(1)});
  EXPECT_EQ(dropped_at_end, Keys{key(2)});
  ASSERT_EQ(agreed.size(), 1U);
  EXPECT_HAS(agreed[0], "read 1 was the end of the iteration where order 0 has 'w2'");
  EXPECT_EQ(follower.dropped(), 1);
}

TEST_F(Replay, WhereTheOthersDisagreeNothingIsStarted) {
  ScheduleFollower follower(
      {threeLayers()}, {}, {}, [](const std::string&) { fail("rank 1 kept to the order"); },
      [](std::int64_t id) { return concat("w", id); });
  follower.begin({});
  follower.next(read(1));
  EXPECT_EQ(testing::errorOf([&] { follower.next(read(3)); }), "rank 1 kept to the order");
  EXPECT_EQ(follower.abandon(), Keys{key(2)});
  EXPECT_FALSE(follower.inCycle());
}

TEST_F(Replay, AnotherVariantIsTakenUpWhereTheFirstIsLeft) {
  const StepSchedule early = {
      {read(1), false, {{key(1), key(2)}}}, {read(3), true, {}}, {saved(3), false, {}}, {saved(1), false, {{key(1)}}}};
  auto follower = make({threeLayers(), early});
  const std::vector<ProgramEvent> reads = {read(1), read(3), saved(3), saved(1)};
  const auto steps = run(follower, reads);
  EXPECT_EQ(agreed.size(), 1U);  // the ranks start different gathers from here on, so they agree
  EXPECT_EQ(follower.divergences(), 0);
  EXPECT_EQ(follower.switches(), 1);
  EXPECT_EQ(steps[1].drop, Keys{key(2)});
  EXPECT_TRUE(steps[1].keep);
  run(follower, reads);  // the variant that was right more often comes first
  EXPECT_EQ(agreed.size(), 1U);
  EXPECT_EQ(follower.switches(), 1);
}

TEST_F(Replay, AVariantThatIsTakenUpLateStartsWhatItWouldHaveStarted) {
  const StepSchedule other = {{read(1), false, {{key(5)}}}, {read(4), false, {}}, {read(5), false, {}}};
  auto follower = make({threeLayers(), other});
  const auto steps = run(follower, {read(1), read(4), read(5)});
  EXPECT_EQ(steps[1].gathers, (std::vector<Keys>{{key(5)}}));
  EXPECT_EQ(follower.divergences(), 0);
}

TEST_F(Replay, OnlyTheGroupOfALeafModuleIsFollowed) {
  const StepSchedule variant = {{group(5), false, {}}, {read(1), false, {}}, {saved(1), false, {}}};
  auto follower = make({variant}, {5, 6});
  const auto steps = run(follower, {group(5), read(6), read(1), saved(6), saved(5), saved(1)});  // routed as it likes
  EXPECT_FALSE(steps[1].followed);
  EXPECT_TRUE(agreed.empty());
  EXPECT_EQ(follower.divergences(), 0);
}

TEST_F(Replay, APersistentParameterIsFollowedAtItsFirstReadAfterAnUpdateOnly) {
  const StepSchedule variant = {{read(1), false, {{key(1), key(2)}}}, {read(2), false, {}}};
  auto follower = make({variant}, {}, {1, 2});
  EXPECT_EQ(run(follower, {read(1), read(2), saved(2), saved(1)})[0].gathers.size(), 1U);
  EXPECT_TRUE(dropped_at_end.empty());
  run(follower, {read(1)}, {1, 2});  // current: a rank may read or not
  EXPECT_TRUE(agreed.empty());
}

TEST_F(Replay, WithoutAnOrderThereIsNothingToFollow) {
  EXPECT_HAS(testing::errorOf([&] { make({}); }), "at least one schedule");
}

}  // namespace
}  // namespace dc
