#include "deepcompile/runtime/registry.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

class Registry : public ::testing::Test {
 protected:
  Registry() { registry_.registerParam(3, {2, 2}, shard_, gradient_, true, 0, false); }

  at::Tensor shard_ = at::ones({2});
  at::Tensor gradient_ = at::ones({2});
  DSParamRegistry registry_;
};

TEST_F(Registry, RegistrationClearsTheGradientBufferAndKeepsTheTensors) {
  EXPECT_TRUE(at::equal(gradient_, at::zeros({2})));
  EXPECT_TRUE(registry_.getParam(3).getDSTensor().is_same(shard_));
  EXPECT_TRUE(registry_.getParam(3).getGradBuffer().is_same(gradient_));
}

TEST_F(Registry, IdsAreInOrderOfRegistration) {
  registry_.registerParam(9, {1}, at::ones({1}), at::ones({1}), true, 0, false);
  registry_.registerParam(1, {1}, at::ones({1}), at::ones({1}), true, 0, false);
  EXPECT_EQ(registry_.getIds(), (std::vector<std::int64_t>{3, 9, 1}));
}

TEST_F(Registry, AnIdThatIsTakenOrUnknownIsAnErrorThatNamesIt) {
  EXPECT_EQ(errorOf([&] { registry_.registerParam(3, {1}, at::ones({1}), {}, true, 0, false); }),
            "parameter (id 3, shape [2, 2], Float) is registered already");
  EXPECT_HAS(errorOf([&] { registry_.getParam(4); }), "no parameter with id 4 is registered; 1 parameters are");
}

TEST_F(Registry, HoldsOneGatheredCopyPerDtype) {
  EXPECT_FALSE(registry_.hasGatheredParam(3));
  EXPECT_HAS(errorOf([&] { registry_.getGatheredParam(3); }), "is not gathered");
  registry_.registerGatheredParam(3, at::zeros({2, 2}));
  registry_.registerGatheredParam(3, at::zeros({2, 2}, at::kHalf));
  const at::Tensor newer = at::ones({2, 2});
  registry_.registerGatheredParam(3, newer);
  EXPECT_EQ(registry_.gatheredCopies(3).size(), 2u);
  EXPECT_TRUE(registry_.findGathered(3, at::kFloat)->tensor.is_same(newer));
  EXPECT_EQ(registry_.findGathered(3, at::kBFloat16), nullptr);
  registry_.unregisterGatheredParam(3);
  EXPECT_FALSE(registry_.hasGatheredParam(3));
}

TEST_F(Registry, ACopyIsValidUntilItsShardChangesInPlace) {
  EXPECT_FALSE(registry_.isValid(3)) << "there is none";
  registry_.registerGatheredParam(3, at::zeros({2, 2}));
  EXPECT_TRUE(registry_.isValid(3));
  shard_.add_(1);
  EXPECT_FALSE(registry_.isValid(3));
  registry_.registerGatheredParam(3, at::zeros({2, 2}));
  EXPECT_TRUE(registry_.isValid(3));
}

TEST_F(Registry, SetValidReachesEveryCopy) {
  registry_.registerGatheredParam(3, at::zeros({2, 2}));
  registry_.registerGatheredParam(3, at::zeros({2, 2}, at::kHalf));
  registry_.setValid(3, false);
  EXPECT_FALSE(registry_.isValid(3));
  EXPECT_FALSE(registry_.isCurrent(3, *registry_.findGathered(3, at::kHalf)));
  registry_.setValid(3, true);
  EXPECT_TRUE(registry_.isValid(3));
}

TEST_F(Registry, AskingForTheValidityOfAnOffloadedParameterDoesNotBringItBack) {
  registry_.registerGatheredParam(3, at::zeros({2, 2}));
  registry_.offload(3);
  EXPECT_TRUE(registry_.isValid(3));
  EXPECT_TRUE(registry_.getParam(3).isOffloaded());
  registry_.reload(3);
  EXPECT_TRUE(registry_.isValid(3)) << "the values are those that were gathered";
}

TEST_F(Registry, TensorsOfInferenceModeHaveNoVersion) {
  const c10::InferenceMode inference;
  const at::Tensor tensor = at::ones({2});
  EXPECT_EQ(DSParamRegistry::versionOf(tensor), 0u);
}

}  // namespace
}  // namespace dc
