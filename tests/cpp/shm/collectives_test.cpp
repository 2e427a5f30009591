// Every collective on every number of ranks, as threads and as processes, with random shapes, types and views.
#include "deepcompile/shm/collectives.h"

#include <sched.h>

#include <gtest/gtest.h>

#include "deepcompile/shm/offers.h"

#include "random_collective.h"
#include "shm_ranks.h"

namespace dc::shm::testing {
namespace {

// Thresholds small enough that a test's sizes take every way: inline, one step, several chunks.
GroupOptions smallSlots(Staging staging) {
  GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  options.slot_bytes = 8192;
  options.tuning = Tuning{
      .one_step_bytes = 1024, .chunk_bytes = 4096, .streaming_bytes = 20000, .long_bytes = 30000, .staging = staging};
  return options;
}

void manyRandom(Group& group, std::uint64_t first, int count, std::int64_t most_bytes) {
  for (int i = 0; i < count; ++i) {
    RandomCollective(first + static_cast<std::uint64_t>(i), group.size(), most_bytes).run(group);
  }
}

class Collectives : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Range(1, 10));

TEST_P(Collectives, GiveTheRightBitsToThreads) {
  const int ranks = GetParam();
  EXPECT_EQ(
      onThreadGroup(ranks, smallSlots(Staging::Cached), [](Group& group) { manyRandom(group, 1000, 400, 60'000); }),
      noErrors(ranks));
}

TEST_P(Collectives, GiveTheRightBitsToProcesses) {
  const int ranks = GetParam();
  EXPECT_EQ(onProcessGroup(ranks, smallSlots(Staging::PastCaches),
                           [](Group& group) { manyRandom(group, 5000, 200, 60'000); }),
            noErrors(ranks));
}

TEST_P(Collectives, GiveTheRightBitsWithMeasuredThresholds) {
  const int ranks = GetParam();
  GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  EXPECT_EQ(onProcessGroup(ranks, options, [](Group& group) { manyRandom(group, 9000, 12, 3'000'000); }),
            noErrors(ranks));
}

// Every second one goes the other way through its chunks, of which the last is shorter than the rest.
TEST_P(Collectives, OfTheSameTensorAgainGiveTheRightBits) {
  const int ranks = GetParam();
  EXPECT_EQ(onThreadGroup(ranks, smallSlots(Staging::Cached),
                          [](Group& group) {
                            std::vector<std::int32_t> tensor(12'345);
                            for (int again = 0; again < 4; ++again) {
                              for (std::size_t i = 0; i < tensor.size(); ++i) {
                                tensor[i] = static_cast<std::int32_t>(i) + group.rank() + again;
                              }
                              allReduce(group, tensor.data(), tensor.data(), 12'345, DType::Int32, ReduceOp::Max);
                              for (std::size_t i = 0; i < tensor.size(); ++i) {
                                check(tensor[i] == static_cast<std::int32_t>(i) + group.size() - 1 + again,
                                      [&] { return concat("wrong element ", i, ", call ", again); });
                              }
                            }
                          }),
            noErrors(ranks));
}

TEST(LongMessages, BeginAtTheirEndAndThoseInTheSameMemoryWhereTheLastOneEnded) {
  const auto group = std::move(Group::ofThreads(1).front());
  Call call(*group, {.kind = Kind::AllReduce});
  std::vector<bool> at_the_end;
  for (const bool just_used : {false, true, true, true, false, false}) {
    at_the_end.push_back(call.beginsAtTheEnd(just_used));
  }
  EXPECT_EQ(at_the_end, (std::vector<bool>{true, false, true, false, true, true}));
}

TEST(LongMessages, AreInTheSameMemoryOnlyWhereAllRanksSaySo) {
  EXPECT_EQ(onThreadGroup(2, smallSlots(Staging::Cached),
                          [](Group& group) {
                            std::vector<std::byte> one(64);
                            std::vector<std::byte> other(64);
                            const auto same = [&](std::vector<std::byte>& memory) {
                              Call call(group, {.kind = Kind::AllReduce});
                              const dc::shm::Run given = run(memory.data(), 64);
                              return exchangeOffers(call, group, {&given, 1}).sameAsLast();
                            };
                            check(!same(one), "the first time");
                            check(same(one), "again");
                            check(!same(group.rank() == 1 ? other : one), "rank 1 has another");
                            check(!same(one), "which was not its last");
                            check(same(one), "on both again");
                          }),
            noErrors(2));
}

// More ranks than such slots have lines for.
TEST(ManyRanks, StayWithinSmallSlots) {
  constexpr int kRanks = 40;
  GroupOptions options = smallSlots(Staging::Cached);
  options.timeout = std::chrono::seconds(60);
  options.slot_bytes = 4096;
  EXPECT_EQ(onThreadGroup(kRanks, options, [](Group& group) { manyRandom(group, 300, 60, 20'000); }), noErrors(kRanks));
}

TEST(Tuning, IsTheSameOnAllRanks) {
  GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  EXPECT_EQ(onProcessGroup(2, options,
                           [](Group& group) {
                             std::int64_t mine[2] = {group.tuning().one_step_bytes, group.tuning().chunk_bytes};
                             std::int64_t all[2] = {0, 0};
                             allReduce(group, mine, all, 2, DType::Int64, ReduceOp::Max);
                             check(all[0] == mine[0] && all[1] == mine[1], "ranks differ");
                             allReduce(group, mine, all, 2, DType::Int64, ReduceOp::Min);
                             check(all[0] == mine[0] && all[1] == mine[1], "ranks differ");
                           }),
            noErrors(2));
}

TEST(Tuning, SetsUpRanksThatAreBoundToDifferentNumbersOfCores) {
  cpu_set_t all;
  CPU_ZERO(&all);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(all), &all), 0);
  if (CPU_COUNT(&all) < 3) {
    GTEST_SKIP() << "needs three cores";
  }
  GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  EXPECT_EQ(Processes(3,
                      [&](int rank, const std::filesystem::path& directory) {
                        cpu_set_t mine = all;
                        for (int core = 0; rank != 1 && CPU_COUNT(&mine) > 2; ++core) {
                          CPU_CLR(core, &mine);
                        }
                        ::sched_setaffinity(0, sizeof(mine), &mine);
                        manyRandom(*openGroup(directory, rank, 3, options), 77, 30, 100'000);
                      })
                .errors(),
            noErrors(3));
}

TEST(Tuning, WithChunksOfLessThanALineIsRefused) {
  GroupOptions options;
  options.tuning = Tuning{.chunk_bytes = kLine - 1};
  EXPECT_NE(errorOf([&] { Group::ofThreads(2, options); }).find("chunks of 127 bytes (at least 128)"),
            std::string::npos);
  options.tuning = Tuning{.chunk_bytes = kLine};
  EXPECT_EQ(onThreadGroup(2, options,
                          [](Group& group) {
                            const Tuning before = group.tuning();
                            check(!errorOf([&] { group.setTuning({.chunk_bytes = 0}); }).empty(), "took no chunks");
                            check(!errorOf([&] { group.setTuning({.one_step_bytes = -1}); }).empty(), "took -1");
                            check(group.tuning() == before, "changed");
                            manyRandom(group, 40, 20, 5000);
                          }),
            noErrors(2));
}

TEST(Tuning, OfRankZeroIsSetByTheEnvironment) {
  GroupOptions options;
  options.timeout = std::chrono::seconds(20);
  EXPECT_EQ(Processes(3,
                      [&](int rank, const std::filesystem::path& directory) {
                        if (rank == 0) {
                          ::setenv("DEEPCOMPILE_SHM_ONE_STEP_BYTES", "12345", 1);
                          ::setenv("DEEPCOMPILE_SHM_CHUNK_BYTES", "20000", 1);
                        }
                        const auto group = openGroup(directory, rank, 3, options);
                        check(group->tuning().one_step_bytes == 12345, "not what rank 0 has set");
                        check(group->tuning().chunk_bytes == 20000, "not what rank 0 has set");
                        manyRandom(*group, 77, 30, 100'000);
                      })
                .errors(),
            noErrors(3));
}

}  // namespace
}  // namespace dc::shm::testing
