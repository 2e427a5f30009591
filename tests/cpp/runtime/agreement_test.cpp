#include "deepcompile/runtime/agreement.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

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

// Every rank must throw this text, not only the one that differs.
void expectOnAllRanks(GroupSetup setup, const std::function<void(Rank&)>& body, const std::string& text) {
  World world(setup);
  for (const std::string& error : errorsOfRanks(world, body)) {
    EXPECT_HAS(error, text);
  }
}

TEST(Agreement, OneCollectiveProvesShardedParametersWhateverTheirNumber) {
  World world(ranks(2));
  runRanks(world, [](Rank& rank) {
    for (int id = 0; id < 50; ++id) {
      rank.addSharded(id, at::zeros({id + 1}));
    }
    rank.graph<Z3CustomOpExecutor>(1, {0, 1});
    rank.agree();
  });
  EXPECT_EQ(world.gathers->history().size(), 1u);
}

TEST(Agreement, TheOrderOfRegistrationDoesNotMatter) {
  runRanks(ranks(2), [](Rank& rank) {
    for (const int id : rank.rank() == 0 ? std::vector<int>{1, 2} : std::vector<int>{2, 1}) {
      rank.addSharded(id, at::zeros({4}));
    }
    rank.agree();
  });
}

TEST(Agreement, ADifferentShapeIsNamedOnEveryRank) {
  expectOnAllRanks(
      ranks(3),
      [](Rank& rank) {
        rank.addSharded(1, at::zeros({4}));
        rank.addSharded(2, rank.rank() == 1 ? at::zeros({2, 2}) : at::zeros({4}));
        rank.agree();
      },
      "the ranks have registered different parameters or graphs:\n"
      "  rank 1 has parameter (id 2, shape [2, 2], Float) sharded in 2, trainable, reduced in Float\n"
      "  where rank 0 has parameter (id 2, shape [4], Float) sharded in 2, trainable, reduced in Float");
}

TEST(Agreement, ADifferentDtypeIsNamed) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.addSharded(1, at::zeros({4}, rank.rank() == 1 ? at::kHalf : at::kFloat));
        rank.agree();
      },
      "rank 1 has parameter (id 1, shape [4], Half)");
}

TEST(Agreement, AParameterThatOneRankFreezesIsNamed) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.addSharded(1, at::zeros({4}), false, /*frozen=*/rank.rank() == 1);
        rank.agree();
      },
      "sharded in 2, frozen");
}

TEST(Agreement, AParameterThatOneRankLacksIsNamed) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.addSharded(1, at::zeros({4}));
        if (rank.rank() == 0) {
          rank.addSharded(2, at::zeros({4}));
        }
        rank.agree();
      },
      "rank 1 has nothing\n  where rank 0 has parameter (id 2");
}

TEST(Agreement, AGraphWithOtherParametersIsNamed) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.addSharded(1, at::zeros({4}));
        rank.addSharded(2, at::zeros({4}));
        const auto graph = rank.graph<Z3CustomOpExecutor>(
            9, rank.rank() == 0 ? std::vector<std::int64_t>{1, 2} : std::vector<std::int64_t>{2, 1});
        rank.agree();
      },
      "rank 1 has graph 9 of ZeRO-3 with parameters [2, 1]\n  where rank 0 has graph 9 of ZeRO-3 with parameters [1, "
      "2]");
}

TEST(Agreement, EachRankLearnsWhoOwnsWhichSliceOfAWholeParameter) {
  World world(ranks(3));
  runRanks(world, [](Rank& rank) {
    const std::vector<Slice> owners = {{4, 10}, {7, 7}, {0, 4}};
    rank.addWhole(1, {5, 2}, owners[rank.rank()]);
    rank.agree();
    const auto& learned = rank.registry->getParam(1).getOwners();
    ASSERT_EQ(learned.size(), 3u);
    EXPECT_EQ(learned[0].begin, 4);
    EXPECT_EQ(learned[0].end, 10);
    EXPECT_EQ(learned[1].size(), 0);
    EXPECT_EQ(learned[2].begin, 0);
    EXPECT_EQ(learned[2].end, 4);
    EXPECT_TRUE(rank.registry->getParam(1).trainable());
  });
  EXPECT_EQ(world.gathers->history().size(), 2u);
}

TEST(Agreement, SlicesThatOverlapOrLeaveAGapAreNamedOnEveryRank) {
  for (const std::int64_t boundary : {3, 5}) {
    expectOnAllRanks(
        ranks(2),
        [boundary](Rank& rank) {
          rank.addWhole(1, {10}, rank.rank() == 0 ? Slice{0, 4} : Slice{boundary, 10});
          rank.agree();
        },
        concat("the ranks' slices of the gradient of parameter (id 1, shape [10], Float) must be disjoint and cover "
               "its 10 "
               "elements:\n  rank 0 owns [0, 4)\n  rank 1 owns [",
               boundary, ", 10)"));
  }
}

TEST(Agreement, SlicesThatStopBeforeTheEndAreRefused) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.addWhole(1, {10}, rank.rank() == 0 ? Slice{0, 4} : Slice{4, 9});
        rank.agree();
      },
      "cover its 10 elements");
}

TEST(Agreement, AWholeParameterThatNobodyOwnsIsFrozen) {
  runRanks(ranks(2), [](Rank& rank) {
    rank.registry->registerParam(1, {4}, at::zeros({4}), at::Tensor(), false, 0, false);
    rank.agree();
    EXPECT_FALSE(rank.registry->getParam(1).trainable());
  });
}

TEST(Agreement, AFrozenParameterWithoutElementsStaysFrozen) {
  runRanks(ranks(2), [](Rank& rank) {
    rank.registry->registerParam(1, {0}, at::zeros({0}), at::Tensor(), false, 0, false);
    rank.addWhole(2, {0}, {0, 0});
    rank.agree();
    EXPECT_FALSE(rank.registry->getParam(1).trainable());
    EXPECT_TRUE(rank.registry->getParam(2).trainable());
  });
}

TEST(Agreement, AWholeParameterThatOneRankRegistersWithoutAGradientBufferIsNamed) {
  expectOnAllRanks(
      ranks(2),
      [](Rank& rank) {
        rank.registry->registerParam(1, {4}, at::zeros({4}), rank.rank() == 0 ? at::zeros({4}) : at::Tensor(), false, 0,
                                     false);
        rank.agree();
      },
      "rank 1 has parameter (id 1, shape [4], Float) whole, frozen");
}

TEST(Agreement, ACollectiveOnWhichTheRanksAgreeCostsOneExchangeAndNoTextNone) {
  World world(ranks(2));
  runRanks(world, [](Rank& rank) {
    agreeOnCollective(*rank.gather_comm, "gather of parameters 1");
    agreeOnCollective(*rank.gather_comm, "");
  });
  EXPECT_EQ(world.gathers->history().size(), 1u);
}

TEST(Agreement, ACollectiveOnWhichTheyDoNotIsNamedOnEveryRank) {
  expectOnAllRanks(
      ranks(3),
      [](Rank& rank) {
        agreeOnCollective(*rank.gather_comm, concat("gather of parameters ", rank.rank() == 2 ? 7 : 1));
      },
      "the ranks are about to run different collectives:\n  rank 2 has gather of parameters 7\n"
      "  where rank 0 has gather of parameters 1");
}

}  // namespace
}  // namespace dc
