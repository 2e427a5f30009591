#include "deepcompile/plan/simulator.h"

#include <gtest/gtest.h>

#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/lower_bound.h"
#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

// Two layers; gathers and reductions take 10 ns a byte, so that times can be read off the plan.
constexpr const char* kGraph = R"(
graph g
world 2
param a bytes=100 shard=50
param b bytes=100 shard=50
buffer x bytes=30
node f1 compute time=1us uses=a makes=x
node f2 compute time=1us uses=b reads=x workspace=7
node b2 compute time=1us phase=backward uses=b grads=b
node b1 compute time=1us phase=backward uses=a reads=x grads=a
node u optimizer time=1us updates=a,b after=b1
)";
constexpr const char* kMachine = "machine m\nshared_links no\ngather 100:1us 200:2us\nreduce 100:1us 200:2us\n";
constexpr const char* kPlan = R"(
plan hand
budget 1000
gather ga a
gather gb b
wait ga
compute f1
release a
wait gb
compute f2
gather gc a
compute b2
release b
reduce rb b
wait gc
compute b1
release a
reduce ra a
wait rb
wait ra
optimizer u
)";

struct Fixture {
  StepGraph graph = parseGraph(kGraph);
  Usage usage{graph};
  Plan plan = parsePlan(kPlan, graph);

  Simulation run(const std::string& more = "") const {
    return simulate(graph, CostModel(parseMachine(kMachine + more), 2), plan);
  }
};

TEST(Simulator, GathersRunBesideComputeAndOnlyTheirExcessIsExposed) {
  const Fixture f;
  ASSERT_FALSE(verify(f.graph, f.plan).has_value());
  const Simulation result = f.run();
  // The first gather is exposed, the second and third are hidden; the last reduction is exposed.
  EXPECT_EQ(result.step, 1000 + 4 * 1000 + 1000 + 1000);
  EXPECT_EQ(result.exposed[static_cast<int>(Resource::Gather)], 1000);
  EXPECT_EQ(result.exposed[static_cast<int>(Resource::Reduce)], 1000);
  EXPECT_EQ(result.busy[static_cast<int>(Resource::Gather)], 3000);
}

TEST(Simulator, ComputeIsSlowerWhileACollectiveRuns) {
  const Fixture f;
  // f1, b2 and b1 run beside a collective of 1 us; at half speed for that time each of them loses
  // half of it.
  EXPECT_EQ(f.run("slowdown 1000\n").step, 7000 + 3 * 500);
}

TEST(Simulator, CollectivesThatShareLinksTakeTurns) {
  Fixture f;
  f.plan = parsePlan(R"(
plan hand
budget 1000
gather g1 a b
wait g1
compute f1
compute f2
compute b2
release b
reduce rb b
compute b1
release a
reduce ra a
wait rb
wait ra
optimizer u
)",
                     f.graph);
  const Nanos apart = f.run().step;
  EXPECT_EQ(f.run("shared_links yes\n").step, apart);  // nothing overlaps here
  f.plan = parsePlan(R"(
plan hand
budget 1000
gather g1 a b
wait g1
compute f1
compute f2
compute b2
release b
release a
reduce rb b
gather g2 a
wait g2
compute b1
release a
reduce ra a
wait rb
wait ra
optimizer u
)",
                     f.graph);
  EXPECT_EQ(f.run("shared_links yes\n").step, f.run().step + 1000);
}

TEST(Simulator, TheHostLaunchesOneNodeAfterTheOther) {
  const Fixture f;
  const Simulation result = f.run("launch 5us\n");
  EXPECT_EQ(result.step, 10 * 5000 + 1000);  // ten launches, the last node runs after its own
  EXPECT_GT(result.host_bound, 0);
}

TEST(Simulator, MemoryFollowsFromTheOrder) {
  const Fixture f;
  const MemoryProfile profile = memoryProfile(f.graph, f.usage, f.plan);
  const Bytes resident = 50 + 50;
  EXPECT_EQ(profile.at[3], resident + 200 + 30);        // f1: both parameters and x
  EXPECT_EQ(profile.at[6], resident + 100 + 30 + 7);    // f2: b, x and its workspace
  EXPECT_EQ(profile.at[8], resident + 200 + 30 + 100);  // b2: both parameters, x, the gradient of b
  EXPECT_EQ(profile.peak, resident + 100 + 30 + 200 > profile.at[8] ? resident + 330 : profile.at[8]);
  EXPECT_EQ(profile.at.back(), resident);
  Bytes held = 0;
  for (const Holder& holder : holders(f.graph, f.usage, f.plan, profile.peak_at)) {
    held += holder.bytes;
  }
  EXPECT_EQ(held, profile.peak);
}

TEST(LowerBound, NoPlanIsFaster) {
  const Fixture f;
  const CostModel cost(parseMachine(kMachine), 2);
  const LowerBound bound = lowerBound(f.graph, f.usage, cost, f.plan.budget);
  EXPECT_EQ(bound.best,
            7000);  // the first gather, five nodes, the last reduction: this plan is optimal
  EXPECT_LE(bound.best, f.run().step);
}

TEST(LowerBound, WithoutRoomToStayGatheredTheGathersOfBackwardCount) {
  const Fixture f;
  const CostModel cost(parseMachine(kMachine), 2);
  // a stays unused over f2 and b2, which need 100 for b, 30 for x and 100 for its gradient beside
  // the 100 of shards.
  EXPECT_EQ(lowerBound(f.graph, f.usage, cost, 1000).gathers, 2000);
  EXPECT_EQ(lowerBound(f.graph, f.usage, CostModel(parseMachine(kMachine), 2), 340).gathers, 3000);
}

}  // namespace
}  // namespace dc::plan
