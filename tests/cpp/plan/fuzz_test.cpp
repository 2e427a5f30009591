// Random texts, from noise to almost right, against the parsers: none may crash or accept what it
// cannot print again. DEEPCOMPILE_FUZZ=N runs N inputs; 1,000,000 take some minutes.
#include <cstdlib>
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/lower_bound.h"
#include "deepcompile/plan/machine.h"
#include "deepcompile/plan/plan.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/text.h"
#include "deepcompile/plan/verifier.h"

#include "random_step.h"

namespace dc::plan {
namespace {

long inputs() {
  const char* wanted = std::getenv("DEEPCOMPILE_FUZZ");
  return wanted == nullptr ? 20000 : std::atol(wanted);
}

class Texts {
 public:
  explicit Texts(unsigned seed) : random_(seed) {}
  std::mt19937& random() { return random_; }

  std::size_t below(std::size_t bound) { return random_() % bound; }

  // A line that may well be right, made of the words that the parsers know.
  std::string line() {
    static const char* const names[] = {"a", "b", "c", "w.1", "x-y", "ü", "graph", "input"};
    static const char* const values[] = {"0",   "1",    "17",   "4KiB",    "1.5us", "2ms", "-3", "", "9999999999999",
                                         "1e9", "1.3B", "bf16", "backward"};
    static const char* const keys[] = {"bytes", "shard", "grad",  "accum",     "state", "dtype",   "time",
                                       "phase", "micro", "block", "workspace", "uses",  "grads",   "updates",
                                       "makes", "reads", "after", "alias",     "bogus", "latency", "bandwidth"};
    static const char* const heads[] = {"graph",   "world",   "stage",  "param",    "buffer",  "node",
                                        "machine", "devices", "budget", "inside",   "gather",  "slowdown",
                                        "launch",  "plan",    "start",  "compute",  "release", "wait",
                                        "reduce",  "offload", "reload", "optimizer"};
    const auto pick = [&](const auto& list) { return std::string(list[below(std::size(list))]); };
    std::string text = concat(pick(heads), " ", pick(names));
    if (text.starts_with("node")) {
      text += below(4) == 0 ? " optimizer" : " compute";
    }
    for (std::size_t i = below(6); i > 0; --i) {
      text += concat(" ", pick(keys), "=", below(2) == 0 ? pick(values) : pick(names));
      text += below(5) == 0 ? concat(",", pick(names)) : "";
    }
    return text + (below(9) == 0 ? " # note" : "");
  }

  std::string fromWords() {
    std::string text;
    for (std::size_t i = below(12); i > 0; --i) {
      text += line() + "\n";
    }
    return text;
  }

  // A right text with some bytes changed, dropped or doubled.
  std::string damaged(std::string text) {
    for (std::size_t i = below(6); i > 0 && !text.empty(); --i) {
      const std::size_t at = below(text.size());
      switch (below(4)) {
        case 0:
          text[at] = static_cast<char>(below(256));
          break;
        case 1:
          text.erase(at, 1 + below(8));
          break;
        case 2:
          text.insert(at, text.substr(below(text.size()), below(20)));
          break;
        default:
          text[at] = "=,#:.0-\n "[below(9)];
      }
    }
    return text;
  }

 private:
  std::mt19937 random_;
};

TEST(Fuzz, TheGraphParserNeverCrashesAndWhatItAcceptsRoundTrips) {
  Texts texts(1);
  std::vector<std::string> good;
  for (int i = 0; i < 20; ++i) {
    good.push_back(print(randomStep(texts.random(), 1 + i % 3)));
  }
  long accepted = 0;
  for (long i = 0; i < inputs(); ++i) {
    const std::string text = i % 2 == 0 ? texts.fromWords() : texts.damaged(good[texts.below(good.size())]);
    StepGraph graph;
    try {
      graph = parseGraph(text);
    } catch (const Error&) {
      continue;
    }
    ++accepted;
    const std::string printed = print(graph);
    ASSERT_EQ(parseGraph(printed), graph) << text;
    ASSERT_EQ(print(parseGraph(printed)), printed) << text;
  }
  EXPECT_GT(accepted, inputs() / 100) << "too few texts were right for the round trip to mean anything";
}

TEST(Fuzz, TheMachineParserNeverCrashesAndWhatItAcceptsRoundTrips) {
  Texts texts(2);
  long accepted = 0;
  for (long i = 0; i < inputs() / 2; ++i) {
    const auto names = presetNames();
    const std::string text =
        i % 2 == 0 ? texts.fromWords() : texts.damaged(print(preset(names[texts.below(names.size())])));
    Machine machine;
    try {
      machine = parseMachine(text);
    } catch (const Error&) {
      continue;
    }
    ++accepted;
    ASSERT_EQ(parseMachine(print(machine)), machine) << text;
  }
  EXPECT_GT(accepted, inputs() / 200);
}

TEST(Fuzz, ThePlanParserNeverCrashesAndTheVerifierJudgesWhatItAccepts) {
  Texts texts(3);
  const StepGraph graph = randomStep(texts.random(), 3);
  const Usage usage(graph);
  const CostModel cost(preset("8xh100"), 4);
  const std::string good = print(graph, makeStrategy("planned")->plan({graph, usage, cost, 1 << 20}));
  long accepted = 0;
  long valid = 0;
  for (long i = 0; i < inputs() / 2; ++i) {
    try {
      const Plan plan = parsePlan(texts.damaged(good), graph);
      ++accepted;
      // Whatever the verifier accepts can be simulated.
      if (!verify(graph, plan).has_value()) {
        ++valid;
        EXPECT_GE(simulate(graph, cost, plan).step, 0);
      }
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(valid, 0);
}

TEST(Fuzz, RandomStepsArePlannedWithinTheirBudgetOrRefusedWithTheLeastThatDoes) {
  Texts texts(4);
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    const StepGraph graph = randomStep(texts.random(), 1 + i % 3);
    const Usage usage(graph);
    const CostModel cost(preset(i % 2 == 0 ? "2xcpu" : "8xh100"), 4);
    const auto budget = static_cast<Bytes>(usage.resident / 2 + texts.below(usage.resident * 2));
    for (const std::string_view name : {"planned", "on_demand"}) {
      try {
        const Plan plan = makeStrategy(name)->plan({graph, usage, cost, budget});
        const auto violation = verify(graph, plan);
        ASSERT_FALSE(violation.has_value()) << name << ": " << violation->reason;
        EXPECT_LE(lowerBound(graph, usage, cost, budget).best, simulate(graph, cost, plan).step) << print(graph, plan);
      } catch (const BudgetError& error) {
        ++refused;
        ASSERT_GT(error.least, budget);
        const Plan plan = makeStrategy(name)->plan({graph, usage, cost, error.least});
        ASSERT_FALSE(verify(graph, plan).has_value()) << name << ": the least that it named is too little";
      }
    }
  }
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace dc::plan
