#include "deepcompile/plan/models.h"

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/strategies/planned.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

std::int64_t elements(const StepGraph& graph) {
  std::int64_t total = 0;
  for (const Param& param : graph.params) {
    total += param.bytes / elementBytes(param.dtype);
  }
  return total;
}

TEST(Models, HaveTheNumberOfParametersTheyAreNamedFor) {
  const Machine machine = preset("8xh100");
  const ModelOptions options;
  EXPECT_NEAR(elements(makeModel("llama3-8b", options, machine)) / 1e9, 8.03, 0.01);
  EXPECT_NEAR(elements(makeModel("llama3-70b", options, machine)) / 1e9, 70.55, 0.05);
  EXPECT_NEAR(elements(makeModel("llama3-405b", options, machine)) / 1e9, 405.8, 0.5);
  EXPECT_NEAR(elements(makeModel("mixtral-8x7b", options, machine)) / 1e9, 46.7, 0.05);
  EXPECT_NEAR(elements(makeModel("gpt2-small", options, machine)) / 1e6, 124.0, 1.0);
}

TEST(Models, ComputeTimeGrowsWithTokensAndAccumulation) {
  const Machine machine = preset("8xh100");
  const auto total = [&](const ModelOptions& options) {
    Nanos time = 0;
    for (const Node& node : makeModel("llama3-8b", options, machine).nodes) {
      time += node.time;
    }
    return time;
  };
  ModelOptions options;
  const Nanos once = total(options);
  options.accumulate = 4;
  EXPECT_GT(total(options), 3 * once);
  options.accumulate = 1;
  options.sequence = 4096;
  EXPECT_GT(total(options), 3 * once);
  options.checkpoint = false;
  EXPECT_LT(total(options), 4 * once);
}

TEST(Models, RoundTripThroughText) {
  ModelOptions options;
  options.accumulate = 2;
  for (const std::string_view model : {"gpt2-small", "tiny-llama", "mixtral-8x7b"}) {
    const StepGraph graph = makeModel(model, options, preset("8xa100"));
    EXPECT_EQ(parseGraph(print(graph)), graph) << model;
  }
}

TEST(Models, AnUnknownModelNamesTheNearest) {
  EXPECT_THROW(
      {
        try {
          makeModel("llama3-7b", {}, preset("8xh100"));
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "unknown model 'llama3-7b'; the nearest is 'llama3-8b'");
          throw;
        }
      },
      Error);
}

TEST(Strategies, EveryOneGivesAPlanThatTheVerifierAcceptsForEveryModelStageAndBudget) {
  const Machine machine = preset("8xh100");
  for (const std::string_view model : {"tiny-llama", "gpt2-small", "llama3-8b"}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool checkpoint : {false, true}) {
        ModelOptions options;
        options.accumulate = model == "llama3-8b" ? 1 : 2;
        options.stage = stage;
        options.checkpoint = checkpoint;
        options.world = 16;
        const StepGraph graph = makeModel(model, options, machine);
        const Usage usage(graph);
        const CostModel cost(machine, options.world);
        Bytes least = usage.resident;
        for (std::size_t slot = 0; slot < graph.nodes.size(); ++slot) {
          least = std::max(least, usage.live[slot] + usage.gathered[slot]);
        }
        for (const std::string_view name : {"on_demand", "per_block", "published", "planned"}) {
          for (const Bytes budget : {least * 3 / 4, least * 11 / 10, least * 3 / 2}) {
            try {
              const Plan plan = makeStrategy(name)->plan({graph, usage, cost, budget});
              const auto violation = verify(graph, plan);
              EXPECT_FALSE(violation.has_value())
                  << model << " " << name << " stage " << stage << ": " << violation->reason;
              EXPECT_GE(simulate(graph, cost, plan).step, 0);
            } catch (const BudgetError&) {
              EXPECT_LT(budget, least * 3 / 2) << model << " " << name << " stage " << stage;
            }
          }
        }
      }
    }
  }
}

TEST(Auto, TakesLessMemoryForAlmostTheSameTimeAndFewerCollectivesForAlmostTheSameMemory) {
  EXPECT_EQ(bestOf({{1000, 500, 9}, {1009, 400, 9}, {1011, 100, 1}}), 1) << "1 % longer, less memory";
  EXPECT_EQ(bestOf({{1000, 500, 9}, {1000, 509, 8}, {1000, 511, 1}}), 1) << "2 % more memory, fewer collectives";
  EXPECT_EQ(bestOf({{1009, 500, 9}, {1000, 500, 9}}), 1) << "the same but for the time";
  EXPECT_EQ(bestOf({{1000, 505, 9}, {1009, 500, 9}}), 1) << "the same but for the memory";
  EXPECT_EQ(bestOf({{2000, 1, 1}, {1000, 500, 9}}), 1) << "memory is not worth twice the time";
}

}  // namespace
}  // namespace dc::plan
