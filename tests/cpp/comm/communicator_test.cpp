#include "deepcompile/comm/communicator.h"

#include <thread>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;
using testing::errorsOfRanks;
using testing::GroupSetup;
using testing::Rank;
using testing::runRanks;
using testing::World;

GroupSetup ranks(int count) {
  GroupSetup setup;
  setup.ranks = count;
  setup.config = testing::configOfTests();
  return setup;
}

TEST(Communicator, ARankOutsideItsGroupIsRefused) {
  const auto point = std::make_shared<testing::MeetingPoint>(2);
  EXPECT_EQ(errorOf([&] { testing::ThreadCommunicator(point, 2, 2, std::make_shared<Traffic>()); }),
            "communicator: rank 2 of 2 does not exist");
}

TEST(Communicator, AGatherPutsTheShardsOneAfterTheOther) {
  runRanks(ranks(3), [](Rank& rank) {
    const at::Tensor first = at::empty({6});
    const at::Tensor second = at::empty({3}, at::kLong);
    const std::vector<GatherPart> parts = {{at::full({2}, rank.rank(), at::kFloat), first},
                                           {at::full({1}, 10 + rank.rank(), at::kLong), second}};
    rank.gather_comm->allGather(parts);
    EXPECT_EQ(first.toString(), "CPUFloatType");
    EXPECT_TRUE(at::equal(first, at::tensor({0.F, 0.F, 1.F, 1.F, 2.F, 2.F})));
    EXPECT_TRUE(at::equal(second, at::tensor({10, 11, 12}, at::kLong)));
    EXPECT_EQ(rank.context->traffic->calls(Collective::AllGather), 1);
    EXPECT_EQ(rank.context->traffic->bytes(Collective::AllGather), 2 * (8 + 8));
  });
}

TEST(Communicator, AGatherIntoTheWrongRoomIsAnErrorWithTheNumbers) {
  World world(ranks(2));
  Rank rank(world, 0);
  const auto gather = [&](const at::Tensor& full) {
    const std::vector<GatherPart> parts = {{at::ones({2}), full}};
    return errorOf([&] { rank.gather_comm->allGather(parts); });
  };
  EXPECT_EQ(gather(at::ones({3})), "all-gather: 3 elements of float cannot hold 2 shards of 2 elements of float");
  EXPECT_HAS(gather(at::ones({4}, at::kHalf)), "of c10::Half cannot hold");
}

TEST(Communicator, AReductionGivesEachRankTheSumOfWhatItOwns) {
  runRanks(ranks(3), [](Rank& rank) {
    const std::vector<Slice> owners = {{2, 5}, {0, 0}, {0, 2}};  // uneven, one empty, out of order
    const at::Tensor send = at::arange(5, at::kFloat) * (1 + rank.rank());
    const at::Tensor receive = at::empty({owners[rank.rank()].size()});
    const std::vector<ReducePart> parts = {{send, owners, receive}};
    rank.reduce_comm->reduceScatter(parts, ReduceOp::Sum);
    const Slice own = owners[rank.rank()];
    EXPECT_TRUE(at::equal(receive, at::arange(own.begin, own.end, at::kFloat) * 6));
    rank.reduce_comm->reduceScatter(parts, ReduceOp::Average);
    EXPECT_TRUE(at::equal(receive, at::arange(own.begin, own.end, at::kFloat) * 2));
  });
}

TEST(Communicator, ARankSendsAllButWhatItOwns) {
  runRanks(ranks(3), [](Rank& rank) {
    const std::vector<Slice> owners = {{0, 5}, {5, 5}, {5, 6}};
    const at::Tensor receive = at::empty({owners[rank.rank()].size()});
    const std::vector<ReducePart> parts = {{at::ones({6}), owners, receive}};
    rank.reduce_comm->reduceScatter(parts, ReduceOp::Sum);
    EXPECT_EQ(rank.context->traffic->bytes(Collective::ReduceScatter), 4 * (6 - owners[rank.rank()].size()));
  });
}

TEST(Communicator, AReductionThatDoesNotFitIsAnErrorWithTheNumbers) {
  World world(ranks(2));
  Rank rank(world, 0);
  const auto reduce = [&](std::vector<Slice> owners, const at::Tensor& receive) {
    const std::vector<ReducePart> parts = {{at::ones({4}), std::move(owners), receive}};
    return errorOf([&] { rank.reduce_comm->reduceScatter(parts, ReduceOp::Sum); });
  };
  EXPECT_EQ(reduce({{0, 4}}, at::ones({4})), "reduce-scatter: 1 owners for 2 ranks");
  EXPECT_EQ(reduce({{0, 2}, {2, 5}}, at::ones({2})), "reduce-scatter: elements [2, 5) of 4");
  EXPECT_EQ(reduce({{0, 2}, {3, 2}}, at::ones({2})), "reduce-scatter: elements [3, 2) of 4");
  EXPECT_EQ(reduce({{0, 2}, {2, 4}}, at::ones({1})),
            "reduce-scatter: rank 0 owns 2 elements of float and has room for 1 of float");
  EXPECT_HAS(reduce({{0, 2}, {2, 4}}, at::ones({2}, at::kDouble)), "of double");
}

TEST(Communicator, AllReduceAndBroadcastLeaveTheSameEverywhere) {
  runRanks(ranks(3), [](Rank& rank) {
    const at::Tensor tensor = at::full({4}, 1.0 + rank.rank());
    rank.reduce_comm->allReduce(tensor, ReduceOp::Average);
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 2.0)));
    tensor.fill_(rank.rank());
    rank.reduce_comm->broadcast(tensor, 2);
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 2.0)));
    EXPECT_EQ(rank.context->traffic->bytes(Collective::Broadcast), rank.rank() == 2 ? 32 : 0);
    rank.reduce_comm->barrier();
  });
}

TEST(Communicator, ABroadcastFromNowhereIsRefused) {
  World world(ranks(2));
  Rank rank(world, 0);
  EXPECT_EQ(errorOf([&] { rank.reduce_comm->broadcast(at::ones({1}), 2); }),
            "broadcast: root 2 does not exist among 2 ranks");
}

TEST(Communicator, ExchangeAnyTakesTextsOfDifferentLengthAndAllBytes) {
  runRanks(ranks(3), [](Rank& rank) {
    const std::vector<std::string> texts = {std::string("a\0b", 3), "", std::string(1000, 'x')};
    EXPECT_EQ(rank.gather_comm->exchangeAny(texts[rank.rank()]), texts);
    EXPECT_EQ(rank.gather_comm->exchangeAny(""), std::vector<std::string>(3));
  });
}

TEST(Communicator, ATimeoutChangesFromOneCallToTheNext) {
  World world(ranks(2));
  Rank rank(world, 0);
  rank.gather_comm->setTimeout(0.05);
  EXPECT_HAS(errorOf([&] { rank.gather_comm->barrier(); }), "rank 0 waited too long in barrier");
}

// The stand-in for a network must itself be trusted.
TEST(ThreadCommunicator, RanksThatRunDifferentOperationsAllHearOfIt) {
  World world(ranks(2));
  const auto errors =
      errorsOfRanks(world, [](Rank& rank) { rank.gather_comm->exchange(std::string(1 + rank.rank(), 'x')); });
  for (const std::string& error : errors) {
    EXPECT_HAS(error, "the ranks run different operations");
  }
}

TEST(ThreadCommunicator, ARankThatFailsLeavesTheOthersToTheirDeadline) {
  World world(ranks(2));
  world.gathers->failAt(1, 1);
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    rank.gather_comm->barrier();
    rank.gather_comm->setTimeout(0.2);
    rank.gather_comm->barrier();
  });
  EXPECT_EQ(errors[0], "rank 0 waited too long in barrier");
  EXPECT_EQ(errors[1], "rank 1 was told to fail in barrier");
}

TEST(ThreadCommunicator, AnAbortEndsWhatIsPending) {
  World world(ranks(2));
  const auto errors = errorsOfRanks(world, [](Rank& rank) {
    if (rank.rank() == 1) {
      rank.gather_comm->abort();
    }
    rank.gather_comm->barrier();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2, "rank 1 aborted"));
}

}  // namespace
}  // namespace dc
