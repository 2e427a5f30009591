#include "deepcompile/plan/graph_builder.h"

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/graph_text.h"

namespace dc::plan {
namespace {

TEST(GraphBuilder, PartsReferToOneAnotherByIndex) {
  StepGraphBuilder builder("two nodes", 2, 3);
  const Index weight = builder.add(Param{.name = "w", .bytes = 8, .shard = 4, .grad = 8});
  const Index saved = builder.add(Buffer{.name = "saved", .bytes = 16});
  builder.add(Node{.name = "f", .time = 10, .uses = {weight}, .makes = {saved}});
  builder.add(Node{.name = "b", .phase = Phase::Backward, .time = 20, .grads = {weight}, .reads = {saved}});
  const StepGraph built = builder.build();
  EXPECT_EQ(built, parseGraph("graph two%20nodes\nworld 2\nparam w bytes=8 shard=4\nbuffer saved bytes=16\n"
                              "node f compute time=10 uses=w makes=saved\n"
                              "node b compute time=20 phase=backward grads=w reads=saved\n"));
}

TEST(GraphBuilder, WhatIsWrongWithAPartIsAnError) {
  StepGraphBuilder builder("g", 2, 3);
  builder.add(Param{.name = "w"});
  EXPECT_THROW(builder.add(Param{.name = "w"}), Error);
  EXPECT_THROW(builder.add(Buffer{.name = "w"}), Error) << "an alias may name either";
  EXPECT_THROW(builder.add(Buffer{.name = ""}), Error);
  builder.add(Node{.name = "w", .uses = {1}});
  EXPECT_THROW(builder.build(), Error) << "there is no parameter 1";
}

}  // namespace
}  // namespace dc::plan
