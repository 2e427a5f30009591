// What it takes to make a plan, counted and not timed: the work must stay near-linear in the size of the step, and what
// the search leaves out must not be able to change what it finds.
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/plan/graph_builder.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/strategies/planned.h"
#include "deepcompile/plan/text.h"

#include "random_step.h"

namespace dc::plan {
namespace {

// Layers of seven parameters, each read once in forward and once in backward.
StepGraph stepOf(Index reads) {
  StepGraphBuilder builder("step", 8, 3);
  const Index params = reads / 2;
  const auto bytes = [](Index param) { return Bytes{1} << (param % 7 < 4 ? 21 : 22); };
  std::vector<Index> all;
  for (Index p = 0; p < params; ++p) {
    const Bytes whole = bytes(p);
    builder.add(Param{.name = concat("w", p),
                      .bytes = whole,
                      .shard = whole / 8,
                      .grad = whole,
                      .accum = whole / 4,
                      .state = whole / 2});
    builder.add(Buffer{.name = concat("a", p), .bytes = 4 << 20});
    all.push_back(p);
  }
  for (Index p = 0; p < params; ++p) {
    builder.add(Node{.name = concat("f", p), .block = p / 7, .time = bytes(p) / 40, .uses = {p}, .makes = {p}});
  }
  for (Index p = params - 1; p >= 0; --p) {
    builder.add(Node{.name = concat("b", p),
                     .phase = Phase::Backward,
                     .block = p / 7,
                     .time = bytes(p) / 20,
                     .uses = {p},
                     .grads = {p},
                     .reads = {p}});
  }
  builder.add(Node{.name = "update",
                   .kind = NodeKind::Optimizer,
                   .phase = Phase::Update,
                   .time = 1000000,
                   .updates = std::move(all)});
  return builder.build();
}

Effort effortOf(Index reads, const Machine& machine, int percent_free) {
  const StepGraph graph = stepOf(reads);
  const Usage usage(graph);
  const CostModel cost(machine, graph.world);
  const Bytes least = leastBudget({graph, usage, cost, 0});
  return makeStrategy("auto")->plan({graph, usage, cost, least + least * percent_free / 100}).effort;
}

TEST(Effort, GrowsNoFasterThanTheStep) {
  for (const int percent_free : {5, 1000}) {
    for (const Offload offload : {Offload::Nothing, Offload::States}) {
      SCOPED_TRACE(concat(percent_free, " % free, offload ", static_cast<int>(offload)));
      Machine machine = preset("8xh100");
      machine.offload = offload;
      std::size_t work_before = 0;
      for (const Index reads : {500, 2000, 8000}) {
        const Effort effort = effortOf(reads, machine, percent_free);
        const auto nodes = static_cast<std::size_t>(reads);
        // One build, one simulation: a few operations for each node, however many nodes there are.
        EXPECT_LE(effort.memory, 12 * nodes * effort.builds) << reads;
        EXPECT_LE(effort.events, 4 * nodes * effort.simulations) << reads;
        // All of them together. A search over four times the nodes may cost four times as much; if anything in it were
        // quadratic, sixteen times.
        const std::size_t work = effort.memory + effort.events;
        EXPECT_GT(work, 0u);
        EXPECT_TRUE(work_before == 0 || work <= 5 * work_before) << reads << ": " << work << " after " << work_before;
        work_before = work;
      }
    }
  }
}

TEST(Effort, OfThousandReadsMostAttemptsLeadToWhatWasTriedBefore) {
  Machine machine = preset("8xh100");
  machine.offload = Offload::Nothing;
  const Effort effort = effortOf(1000, machine, 1000);
  EXPECT_LE(effort.builds, 600u);       // of some 1,200 attempts
  EXPECT_LE(effort.simulations, 300u);  // of these
}

// Settings within the leeway of a build lead to the same schedule.
TEST(Effort, LeewayHoldsOnlyWhatIsBuiltAlike) {
  std::mt19937 random(11);
  int held = 0;
  for (int i = 0; i < 400; ++i) {
    const StepGraph graph = randomStep(random, 1 + static_cast<int>(random() % 3));
    const Usage usage(graph);
    Machine machine = preset(i % 2 == 0 ? "2xcpu" : "8xh100");
    machine.offload = static_cast<Offload>(random() % 3);
    const CostModel cost(machine, graph.world);
    const auto below = [&](Bytes bound) { return static_cast<Bytes>(random() % static_cast<std::uint64_t>(bound)); };
    const Problem problem{graph, usage, cost, usage.resident / 2 + below(usage.resident * 2)};
    const auto vary = [&](Bytes value) { return random() % 3 != 0 ? value : below(2) * (1 + below(12000)); };
    const auto varied = [&](Settings settings) {
      for (const Leeway::Amount amount :
           {&Settings::reserve, &Settings::gather_bucket, &Settings::reduce_bucket, &Settings::pending,
            &Settings::defer, &Settings::make_room, &Settings::make_room_each}) {
        settings.*amount = vary(settings.*amount);
      }
      settings.farthest = random() % 2 == 0;
      return settings;
    };
    const Timeline timeline = undisturbed(graph);
    const Overrides overrides;
    const auto build = [&](const Settings& settings) {
      ScheduleBuilder builder(problem, settings, timeline, overrides);
      std::string plan;
      try {
        plan = print(graph, emit(problem, builder.build(), "planned"));
      } catch (const BudgetError& error) {
        plan = error.what();
      }
      return std::pair{plan, builder.leeway()};
    };
    const Settings first = varied(varied({}));
    const auto [plan, leeway] = build(first);
    ASSERT_TRUE(leeway.holds(first));
    for (int j = 0; j < 20; ++j) {
      const Settings other = varied(first);
      if (leeway.holds(other)) {
        ++held;
        ASSERT_EQ(build(other).first, plan);
      }
    }
  }
  EXPECT_GT(held, 500);
}

TEST(Effort, ASimulationStopsOnlyWhenTheStepWouldTakeSoLong) {
  std::mt19937 random(12);
  int stopped = 0;
  for (int i = 0; i < 200; ++i) {
    const StepGraph graph = randomStep(random, 1 + i % 3);
    const Usage usage(graph);
    const CostModel cost(preset(i % 2 == 0 ? "2xcpu" : "8xh100"), graph.world);
    const Plan plan = makeStrategy("per_block")->plan({graph, usage, cost, 1 << 20});
    const Nanos step = simulate(graph, cost, plan).step;
    for (const Nanos limit : {step / 2, step - 1, step, step + 1, 2 * step}) {
      const Simulation run = simulate(graph, cost, plan, limit);
      ASSERT_LE(run.step, step);
      ASSERT_TRUE(run.complete ? run.step == step : run.step >= limit);
      ASSERT_EQ(run.complete, step < limit);
      stopped += run.complete ? 0 : 1;
    }
  }
  EXPECT_GT(stopped, 500);
}

}  // namespace
}  // namespace dc::plan
