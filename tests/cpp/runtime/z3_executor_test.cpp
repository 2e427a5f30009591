#include "deepcompile/runtime/z3_executor.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::close;
using testing::errorOf;
using testing::gradientOf;
using testing::GroupSetup;
using testing::meanGradient;
using testing::Rank;
using testing::runRanks;
using testing::World;

// Parameter 1 divides by no number of ranks used here, 2 is smaller than that number, 3 has no elements.
const std::vector<std::int64_t> kIds = {1, 2, 3};
at::Tensor valuesOf(std::int64_t id) {
  switch (id) {
    case 1:
      return at::arange(35, at::kFloat).view({5, 7}) + 0.5;
    case 2:
      return at::full({1}, 2.5);
    default:
      return at::empty({0, 4});
  }
}

class Z3 : public ::testing::TestWithParam<CpuStreamMode> {
 protected:
  GroupSetup setup(int ranks = 3) const { return {ranks, GetParam(), 16, testing::configOfTests()}; }
};

std::shared_ptr<Z3CustomOpExecutor> graphOf(Rank& rank, bool persistent = false) {
  for (const std::int64_t id : kIds) {
    rank.addSharded(id, valuesOf(id), persistent);
  }
  auto graph = rank.graph<Z3CustomOpExecutor>(1, kIds);
  rank.agree();
  return graph;
}

at::Tensor gather(Z3CustomOpExecutor& graph, std::int64_t id, std::optional<at::ScalarType> dtype = std::nullopt) {
  at::Tensor full = graph.allgatherParam(id, dtype);
  graph.gatherer().wait(full, id);
  return full;
}

TEST_P(Z3, AGatheredParameterHasTheTrueShapeAndTheValuesOfAllShards) {
  for (const int ranks : {1, 2, 3}) {
    runRanks(setup(ranks), [](Rank& rank) {
      const auto graph = graphOf(rank);
      for (const std::int64_t id : kIds) {
        const at::Tensor full = gather(*graph, id);
        EXPECT_TRUE(at::equal(full, valuesOf(id))) << id;
        EXPECT_FALSE(full.is_alias_of(rank.registry->getParam(id).getDSTensor()));
        EXPECT_FALSE(full.requires_grad());
      }
    });
  }
}

TEST_P(Z3, AShardIsCastBeforeItTravels) {
  runRanks(setup(2), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor full = gather(*graph, 1, at::kBFloat16);
    EXPECT_TRUE(at::equal(full, valuesOf(1).to(at::kBFloat16)));
    EXPECT_EQ(rank.context->traffic->bytes(Collective::AllGather), 18 * 2);
  });
}

TEST_P(Z3, ACopyThatIsCurrentIsUsedAgainAndOneWhoseShardChangedIsNot) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor first = gather(*graph, 1);
    EXPECT_TRUE(gather(*graph, 1).is_alias_of(first));
    EXPECT_EQ(rank.context->stats.gathers_launched, 1);
    EXPECT_EQ(rank.context->stats.gathers_reused, 1);
    rank.reduce_comm->barrier();
    {
      const at::AutoDispatchBelowAutograd no_autograd;
      rank.registry->getParam(1).getDSTensor().add_(1);
    }
    rank.registry->getParam(1).getDSTensor().unsafeGetTensorImpl()->bump_version();
    const at::Tensor second = gather(*graph, 1);
    EXPECT_TRUE(at::equal(second, valuesOf(1) + 1));
    EXPECT_HAS(errorOf([&] { first.const_data_ptr<float>(); }), "was gathered again after its shard had changed");
  });
}

TEST_P(Z3, AFusedPrefetchIsOneCommunicationAndLeavesNothingToLaunch) {
  World world(setup());
  runRanks(world, [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().prefetch({1, 2, 1}, std::nullopt);
    EXPECT_TRUE(at::equal(gather(*graph, 1), valuesOf(1)));
    EXPECT_TRUE(at::equal(gather(*graph, 2), valuesOf(2)));
    EXPECT_EQ(rank.context->traffic->calls(Collective::AllGather), 1);
    EXPECT_EQ(rank.context->stats.gathers_fused, 2);
    graph->gatherer().prefetch({1, 2}, std::nullopt);
    EXPECT_EQ(rank.context->traffic->calls(Collective::AllGather), 1);
    graph->gatherer().prefetch({2, 1}, std::vector<at::ScalarType>{at::kHalf, at::kFloat});
    EXPECT_TRUE(at::equal(gather(*graph, 2, at::kHalf), valuesOf(2).to(at::kHalf)));
    EXPECT_HAS(errorOf([&] { graph->gatherer().prefetch({1}, std::vector<at::ScalarType>{}); }),
               "0 dtypes for 1 parameters");
  });
  EXPECT_EQ(world.gathers->history()[1], "all_gather 12+1");
}

TEST_P(Z3, AReleaseAfterTheLastOfItsUsersFreesTheStorageAndSaysSo) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    for (int pass = 0; pass < 2; ++pass) {
      graph->startForward();
      const at::Tensor full = gather(*graph, 1);
      graph->gatherer().release(1, 2);
      EXPECT_TRUE(at::equal(full, valuesOf(1)));
      EXPECT_GT(rank.pool->live(), 0);
      graph->gatherer().release(1, 2);
      EXPECT_EQ(rank.pool->live(), 0);
      EXPECT_EQ(full.storage().nbytes(), 0u);
      EXPECT_HAS(
          errorOf([&] { full.const_data_ptr<float>(); }),
          "parameter (id 1, shape [5, 7], Float) is read after its storage was freed by release_param (graph 1, ");
    }
    EXPECT_EQ(rank.context->stats.releases, 2);
  });
}

TEST_P(Z3, TheMemoryOfAReleasedParameterServesTheNextGather) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    for (int i = 0; i < 5; ++i) {
      gather(*graph, 1);
      graph->gatherer().release(1, 1);
    }
    EXPECT_EQ(rank.pool->taken() - rank.pool->reused(), 1);
  });
}

TEST_P(Z3, DifferentCountsOfUsersInOnePassAreRefused) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    gather(*graph, 1);
    graph->gatherer().release(1, 3);
    EXPECT_HAS(errorOf([&] { graph->gatherer().release(1, 2); }),
               "is released with n_users=2 after n_users=3 in the same pass");
    EXPECT_HAS(errorOf([&] { graph->gatherer().release(1, 1); }), "is released with n_users=1 after n_users=3");
    EXPECT_HAS(errorOf([&] { graph->gatherer().release(1, 0); }), "n_users is 0");
    graph->startForward();  // another pass counts anew
    EXPECT_EQ(errorOf([&] { graph->gatherer().release(1, 2); }), "");
  });
}

TEST_P(Z3, APersistentParameterStaysGathered) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank, /*persistent=*/true);
    const at::Tensor full = gather(*graph, 1);
    graph->gatherer().release(1, 1);
    EXPECT_TRUE(at::equal(full, valuesOf(1)));
    gather(*graph, 1);
    EXPECT_EQ(rank.context->stats.gathers_launched, 1);
  });
}

TEST_P(Z3, ATensorOverShardsIsTakenUpAgainWhereNobodyHasItAnyMoreUntilTheReadsEnd) {
  GroupSetup alone = setup(1);
  alone.config.debug = false;  // which wants memory of its own
  runRanks(alone, [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor& shard = rank.registry->getParam(1).getDSTensor();
    const auto read = [&](bool traced = true) {
      return graph->gatherer().read(1, std::nullopt, /*keep=*/false, /*backward=*/false, traced);
    };
    const auto storageOf = [](const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); };
    const auto& stats = rank.context->stats;
    graph->startForward();
    graph->holdShards(true);
    const c10::Storage first = read().storage();  // held, so that no other storage gets its address
    EXPECT_EQ(first.data(), shard.const_data_ptr());
    at::Tensor second = read();
    EXPECT_NE(storageOf(second), first.unsafeGetStorageImpl()) << "somebody has it";
    const void* const let_go = storageOf(second);
    second.reset();
    EXPECT_FALSE(rank.registry->hasGatheredParam(1));
    EXPECT_NE(storageOf(read(/*traced=*/false)), let_go) << "one whose writers are told";
    second = read();
    const void* const taken = storageOf(second);
    second.reset();
    second = read();
    EXPECT_EQ(storageOf(second), taken);
    EXPECT_EQ(stats.gathers_in_place, 5);
    EXPECT_EQ(stats.gathers_launched, 5);
    EXPECT_EQ(stats.gathers_reused, 0);
    {
      const at::NoGradGuard no_grad;
      shard.add_(1);
    }
    const at::Tensor changed = read();
    EXPECT_NE(storageOf(changed), taken) << "somebody has it";
    EXPECT_TRUE(at::equal(changed, valuesOf(1) + 1));
    EXPECT_TRUE(at::equal(second, changed)) << "what was handed out stays readable";
    const c10::Storage last = read().storage();
    graph->endReads();
    EXPECT_NE(read().const_data_ptr(), shard.const_data_ptr());
    EXPECT_EQ(stats.gathers_in_place, 7);
    EXPECT_EQ(stats.gathers_launched, 8);
  });
}

TEST_P(Z3, ATensorOverShardsServesLaterStepsUntilTheShardLiesElsewhere) {
  GroupSetup alone = setup(1);
  alone.config.debug = false;
  runRanks(alone, [](Rank& rank) {
    const auto graph = graphOf(rank);
    const at::Tensor& shard = rank.registry->getParam(1).getDSTensor();
    const auto read = [&] {
      return graph->gatherer().read(1, std::nullopt, /*keep=*/false, /*backward=*/false, /*traced=*/true);
    };
    const auto begin = [&] {
      graph->endReads();
      graph->startForward();
      graph->holdShards(true);
    };
    const void* first = nullptr;
    for (int step = 0; step < 3; ++step) {
      begin();
      const at::Tensor tensor = read();
      first = step == 0 ? tensor.storage().unsafeGetStorageImpl() : first;
      EXPECT_EQ(tensor.storage().unsafeGetStorageImpl(), first);
      EXPECT_TRUE(at::equal(tensor, valuesOf(1) + step));
      EXPECT_EQ(gatherKeyOf(tensor)->version, DSParamRegistry::versionOf(shard)) << "what autograd saves of it";
      const at::NoGradGuard no_grad;
      shard.add_(1);
    }
    const c10::Storage before = shard.storage();  // held, so that no other memory gets its address
    shard.unsafeGetTensorImpl()->set_storage_keep_dtype(shard.clone().storage());
    begin();
    EXPECT_EQ(read().const_data_ptr(), shard.const_data_ptr());
    graph->startForward();
    EXPECT_FALSE(rank.registry->hasGatheredParam(1));
    EXPECT_NE(read().const_data_ptr(), shard.const_data_ptr()) << "nobody holds the shards still";
    begin();
    read();
    EXPECT_EQ(rank.registry->gatheredCopies(1).size(), 1);
    rank.registry->offload(1);
    EXPECT_TRUE(rank.registry->gatheredCopies(1).empty()) << "its memory is gone";
  });
}

TEST_P(Z3, StorageIsFreedWhenNoGraphHoldsTheParameter) {
  runRanks(setup(), [](Rank& rank) {
    const auto first = graphOf(rank);
    const auto second = rank.graph<Z3CustomOpExecutor>(2, {2, 1});
    const at::Tensor full = gather(*first, 1);
    gather(*second, 1);
    first->gatherer().release(1, 1);
    EXPECT_TRUE(at::equal(full, valuesOf(1)));
    second->gatherer().release(1, 1);
    EXPECT_EQ(rank.pool->live(), 0);
  });
}

TEST_P(Z3, WaitingForWhatIsNotBeingGatheredIsAnError) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    EXPECT_HAS(errorOf([&] { graph->gatherer().wait(at::empty({0}), 1); }), "is not being gathered (graph 1, ");
    graph->allgatherParam(1, std::nullopt);
    EXPECT_EQ(errorOf([&] { graph->gatherer().wait(at::empty({0}), 1); }), "") << "the id decides, not the tensor";
  });
}

TEST_P(Z3, WhatAutogradSavedIsGatheredAgainUntilItIsLetGo) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    const auto key = *gatherKeyOf(gather(*graph, 1, at::kBFloat16));
    graph->gatherer().release(1, 1);
    {
      const at::Tensor again = graph->gatherer().readAgain(key);
      EXPECT_TRUE(at::equal(again, valuesOf(1).to(at::kBFloat16)));
      EXPECT_EQ(rank.context->stats.gathers_in_backward, 1);
      EXPECT_GT(rank.pool->live(), 0);
    }
    EXPECT_EQ(rank.pool->live(), 0);
    rank.registry->getParam(1).getDSTensor().unsafeGetTensorImpl()->bump_version();
    EXPECT_HAS(errorOf([&] { graph->gatherer().readAgain(key); }), "was changed between the forward and the backward");
  });
}

TEST_P(Z3, AnOffloadedShardIsBroughtBackForItsGather) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->gatherer().offload(1);
    EXPECT_TRUE(rank.registry->getParam(1).isOffloaded());
    EXPECT_TRUE(at::equal(gather(*graph, 1), valuesOf(1)));
    graph->gatherer().release(1, 1);
    graph->gatherer().offload(1);
    graph->gatherer().offload(1);  // is away already: nothing to do or to count
    graph->gatherer().reload(1);
    EXPECT_TRUE(at::equal(gather(*graph, 1), valuesOf(1)));
    EXPECT_EQ(rank.context->stats.bytes_offloaded, 2 * 12 * 4);
    EXPECT_EQ(rank.context->stats.bytes_reloaded, 12 * 4);
  });
}

// This rank's part of the padded mean over the ranks.
at::Tensor shardOfMean(const Rank& rank, std::int64_t id, const std::vector<int>& backwards) {
  const std::int64_t numel = valuesOf(id).numel();
  const std::int64_t shard = rank.gradient(id).numel();
  const at::Tensor padded = at::zeros({shard * rank.setup.ranks}, at::kDouble);
  for (const int backward : backwards) {
    padded.narrow(0, 0, numel).add_(meanGradient(rank.setup.ranks, id, numel, backward));
  }
  return padded.narrow(0, rank.rank() * shard, shard);
}

void runBackward(Z3CustomOpExecutor& graph, const Rank& rank, int backward, std::optional<bool> update) {
  if (update) {
    graph.startBackward(*update);
  }
  for (auto id = kIds.rbegin(); id != kIds.rend(); ++id) {
    graph.reduceGrad(gradientOf(rank.rank(), *id, valuesOf(*id).numel(), backward).view(valuesOf(*id).sizes()), *id);
  }
  graph.endBackward();
}

TEST_P(Z3, EachShardReceivesItsPartOfTheMeanAndThePaddingStaysZero) {
  for (const int ranks : {1, 2, 3}) {
    runRanks(setup(ranks), [](Rank& rank) {
      const auto graph = graphOf(rank);
      runBackward(*graph, rank, 0, false);
      runBackward(*graph, rank, 1, true);
      for (const std::int64_t id : kIds) {
        EXPECT_TRUE(close(rank.gradient(id), shardOfMean(rank, id, {0, 1}))) << id;
      }
      runBackward(*graph, rank, 2, true);
      for (const std::int64_t id : kIds) {
        EXPECT_TRUE(close(rank.gradient(id), shardOfMean(rank, id, {2}))) << id;
        EXPECT_TRUE(rank.registry->getParam(id).getDSTensor().grad().is_alias_of(rank.gradient(id)));
      }
    });
  }
}

TEST_P(Z3, InThePlainLoopAGradientThatTheUserDidNotClearIsAddedTo) {
  for (const int ranks : {1, 2}) {
    runRanks(setup(ranks), [](Rank& rank) {
      const auto graph = graphOf(rank);
      const at::Tensor shard = rank.registry->getParam(1).getDSTensor();
      runBackward(*graph, rank, 0, std::nullopt);
      runBackward(*graph, rank, 1, std::nullopt);
      EXPECT_TRUE(close(shard.grad(), shardOfMean(rank, 1, {0, 1})));
      shard.mutable_grad() = shard.grad().clone() * 2;  // for example clipped out of place
      runBackward(*graph, rank, 2, std::nullopt);
      EXPECT_TRUE(close(shard.grad(), shardOfMean(rank, 1, {0, 0, 1, 1, 2})));
      shard.mutable_grad() = at::Tensor();
      runBackward(*graph, rank, 3, std::nullopt);
      EXPECT_TRUE(close(shard.grad(), shardOfMean(rank, 1, {3})));
    });
  }
}

TEST_P(Z3, AParameterForWhichNoRankHadAGradientKeepsNone) {
  runRanks(setup(), [](Rank& rank) {
    const auto graph = graphOf(rank);
    graph->startBackward(true);
    if (rank.rank() == 1) {
      graph->reduceGrad(gradientOf(1, 1, 35), 1);
    }
    graph->endBackward();
    EXPECT_TRUE(rank.registry->getParam(1).getDSTensor().grad().defined());
    EXPECT_FALSE(rank.registry->getParam(2).getDSTensor().grad().defined());
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Z3, ::testing::Values(CpuStreamMode::Inline, CpuStreamMode::Worker),
                         [](const auto& info) { return testing::nameOf(info.param); });

}  // namespace
}  // namespace dc
