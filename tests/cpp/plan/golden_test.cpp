// Golden plans: tests/plans/*.txt hold a machine (the fake cost model), a graph and what must hold
// of the plan. A file says
//   gather A before compute F      relative positions; A#2 is the second such instruction
//   together gather A B            one collective
//   apart gather A B               two collectives
//   count gather A 1               how many instructions of the kind name A
//   none gather A                  the same as count 0
//   reason gather A TEXT...        the explanation holds TEXT
//   step TIME                      the simulated step takes exactly this
//   fails TEXT...                  planning fails with this text
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/text.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

struct Golden {
  std::map<std::string, std::string> sections;  // machine, graph, expect
  std::string strategy;
  Bytes budget = 0;
};

Golden read(const std::filesystem::path& path) {
  std::ifstream file(path);
  Golden golden;
  std::string section;
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with("--- ")) {
      std::istringstream words(line.substr(4));
      words >> section;
      if (section == "plan") {
        std::string budget;
        words >> golden.strategy >> budget;
        golden.budget = std::stoll(budget);
      }
    } else {
      golden.sections[section] += line + "\n";
    }
  }
  return golden;
}

class Checker {
 public:
  Checker(const StepGraph& graph, const Plan& plan) : graph_(graph), plan_(plan) {}

  // Instructions of a kind that work on a name; a wait works on what its operation does.
  std::vector<std::size_t> all(const std::string& kind, const std::string& name) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      const Instruction& in = plan_.instructions[i];
      if (dc::plan::name(in.kind) != kind) {
        continue;
      }
      const Instruction* named = &in;
      if (in.kind == NodeKind::Wait) {
        named = &*std::ranges::find_if(plan_.instructions, [&](const Instruction& other) {
          return other.op == in.op && other.kind != NodeKind::Wait;
        });
      }
      bool matches = named->node != kNone && graph_.nodes[named->node].name == name;
      for (const Item& item : plan_.itemsOf(*named)) {
        matches = matches || nameOf(graph_, item) == name;
      }
      if (matches) {
        found.push_back(i);
      }
    }
    return found;
  }

  std::size_t one(const std::string& kind, const std::string& text) const {
    const std::size_t hash = text.find('#');
    const std::size_t number = hash == std::string::npos ? 1 : std::stoul(text.substr(hash + 1));
    const auto found = all(kind, text.substr(0, hash));
    if (found.size() < number) {
      ADD_FAILURE() << "no " << kind << " " << text;
      return 0;
    }
    return found[number - 1];
  }

 private:
  const StepGraph& graph_;
  const Plan& plan_;
};

void check(const std::string& line, const StepGraph& graph, const Plan& plan, const Simulation& run) {
  SCOPED_TRACE(line);
  std::istringstream in(line);
  const Checker checker(graph, plan);
  std::string word;
  std::string kind;
  std::string name;
  in >> word;
  if (word == "step") {
    in >> name;
    EXPECT_EQ(exactNanos(run.step), name);
  } else if (word == "together" || word == "apart") {
    std::string other;
    in >> kind >> name >> other;
    EXPECT_EQ(checker.one(kind, name) == checker.one(kind, other), word == "together");
  } else if (word == "count" || word == "none") {
    std::size_t count = 0;
    in >> kind >> name;
    if (word == "count") {
      in >> count;
    }
    EXPECT_EQ(checker.all(kind, name).size(), count);
  } else if (word == "reason") {
    in >> kind >> name >> std::ws;
    std::string text;
    std::getline(in, text);
    const std::string why = explain(plan.reasons[checker.one(kind, name)]);
    EXPECT_NE(why.find(text), std::string::npos) << why;
  } else {
    std::string relation;
    std::string other_kind;
    std::string other;
    in >> name >> relation >> other_kind >> other;
    ASSERT_EQ(relation, "before") << "unknown expectation";
    EXPECT_LT(checker.one(word, name), checker.one(other_kind, other));
  }
}

TEST(Golden, EveryPlanInTestsPlansHoldsWhatItsFileSays) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(DEEPCOMPILE_PLANS)) {
    if (entry.path().extension() == ".txt") {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  EXPECT_GE(paths.size(), 12u);
  for (const std::filesystem::path& path : paths) {
    SCOPED_TRACE(path.filename().string());
    const Golden golden = read(path);
    const StepGraph graph = parseGraph(golden.sections.at("graph"), path.filename().string());
    const CostModel cost(parseMachine(golden.sections.at("machine")), graph.world);
    const Usage usage(graph);
    std::istringstream expectations(golden.sections.at("expect"));
    std::string line;
    try {
      const Plan plan = makeStrategy(golden.strategy)->plan({graph, usage, cost, golden.budget});
      const auto violation = verify(graph, plan);
      ASSERT_FALSE(violation.has_value()) << violation->reason;
      SCOPED_TRACE(print(graph, plan));
      EXPECT_EQ(hashOf(parsePlan(print(graph, plan), graph)), hashOf(plan)) << "the text form executes the same";
      const Simulation run = simulate(graph, cost, plan);
      while (std::getline(expectations, line)) {
        if (!line.empty() && line[0] != '#') {
          check(line, graph, plan, run);
        }
      }
    } catch (const BudgetError& error) {
      while (std::getline(expectations, line) && !line.starts_with("fails ")) {
      }
      ASSERT_TRUE(line.starts_with("fails ")) << error.what();
      EXPECT_NE(std::string(error.what()).find(line.substr(6)), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace dc::plan
