// Breaks good plans in every way that the verifier names, a hundred random ways each; every one
// must be caught.
#include "deepcompile/plan/verifier.h"

#include <algorithm>
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategy.h"

#include "random_step.h"

namespace dc::plan {
namespace {

constexpr const char* kMachine =
    "machine m\ndevices 4\ninside latency=2us bandwidth=400MB\nto_device latency=1us "
    "bandwidth=500MB\n"
    "to_host latency=1us bandwidth=500MB\nslowdown 50\n";

struct Case {
  StepGraph graph;
  Plan plan;
};

// A good plan, of any strategy, under a budget from the least that does up to plenty: so that some
// offload, some not.
Case randomCase(std::mt19937& random, int stage) {
  while (true) {
    Case made;
    made.graph = randomStep(random, stage);
    const Usage usage(made.graph);
    const CostModel cost(parseMachine(kMachine), 4);
    Bytes most = usage.resident;
    for (std::size_t slot = 0; slot < usage.live.size(); ++slot) {
      most = std::max(most, usage.live[slot] + usage.gathered[slot]);
    }
    const char* names[] = {"planned", "planned", "published", "per_block", "on_demand"};
    try {
      const Bytes budget = most * (40 + static_cast<Bytes>(random() % 100)) / 100;
      made.plan = makeStrategy(names[random() % 5])->plan({made.graph, usage, cost, budget});
      return made;
    } catch (const BudgetError&) {
    }
  }
}

// Good plans to damage: making them takes longer than checking them.
const std::vector<Case>& pool(int stage) {
  static const std::vector<std::vector<Case>> pools = [] {
    std::mt19937 random(11);
    std::vector<std::vector<Case>> made(4);
    for (int s = 1; s <= 3; ++s) {
      for (int i = 0; i < (s == 3 ? 150 : 30); ++i) {
        made[s].push_back(randomCase(random, s));
        const auto violation = verify(made[s].back().graph, made[s].back().plan);
        EXPECT_FALSE(violation.has_value())
            << made[s].back().plan.strategy << ": " << violation->reason << "\n"
            << print(made[s].back().graph) << print(made[s].back().graph, made[s].back().plan);
      }
    }
    return made;
  }();
  return pools[stage];
}

using Mutation = std::function<bool(Case&, std::mt19937&)>;  // false: this plan has nothing to break that way

std::vector<std::size_t> find(const Plan& plan, const std::function<bool(const Instruction&)>& wanted) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    if (wanted(plan.instructions[i])) {
      found.push_back(i);
    }
  }
  return found;
}

std::size_t any(const std::vector<std::size_t>& found, std::mt19937& random) { return found[random() % found.size()]; }

void erase(Plan& plan, std::size_t at) {
  plan.instructions.erase(plan.instructions.begin() + static_cast<std::ptrdiff_t>(at));
  plan.reasons.erase(plan.reasons.begin() + static_cast<std::ptrdiff_t>(at));
}

void insert(Plan& plan, std::size_t at, const Instruction& instruction) {
  plan.instructions.insert(plan.instructions.begin() + static_cast<std::ptrdiff_t>(at), instruction);
  plan.reasons.insert(plan.reasons.begin() + static_cast<std::ptrdiff_t>(at), Reason{});
}

void move(Plan& plan, std::size_t from, std::size_t to) {
  const Instruction instruction = plan.instructions[from];
  erase(plan, from);
  insert(plan, to > from ? to - 1 : to, instruction);
}

NodeKind kindOf(const Plan& plan, Index op) {
  for (const Instruction& in : plan.instructions) {
    if (in.op == op && in.kind != NodeKind::Wait) {
      return in.kind;
    }
  }
  return NodeKind::Compute;
}

std::size_t waitOf(const Plan& plan, Index op) {
  const auto found = find(plan, [&](const Instruction& in) { return in.kind == NodeKind::Wait && in.op == op; });
  return found.empty() ? plan.instructions.size() : found[0];
}

bool isNode(const Instruction& in) { return in.node != kNone; }

bool usesDirectly(const StepGraph& graph, const Instruction& in, Index param) {
  return isNode(in) && std::ranges::find(graph.nodes[in.node].uses, param) != graph.nodes[in.node].uses.end();
}
bool usesByView(const StepGraph& graph, const Instruction& in, Index param) {
  return isNode(in) && std::ranges::any_of(graph.nodes[in.node].reads,
                                           [&](Index buffer) { return viewedParam(graph, buffer) == param; });
}

// Moves a release to just before a use that comes before it (and after its gather).
bool releaseTooEarly(Case& c, std::mt19937& random, bool by_view) {
  const auto releases = find(c.plan, [&](const Instruction& in) {
    return in.kind == NodeKind::Release && c.plan.itemsOf(in)[0].kind == ItemKind::Param;
  });
  if (releases.empty()) {
    return false;
  }
  const std::size_t at = any(releases, random);
  const Index param = c.plan.itemsOf(c.plan.instructions[at])[0].id;
  for (std::size_t i = at; i-- > 0;) {
    const Instruction& in = c.plan.instructions[i];
    if (in.kind == NodeKind::Gather) {
      const auto items = c.plan.itemsOf(in);
      if (std::ranges::find(items, Item{ItemKind::Param, param}) != items.end()) {
        return false;
      }
    }
    if (by_view ? usesByView(c.graph, in, param) : usesDirectly(c.graph, in, param)) {
      move(c.plan, at, i);
      return true;
    }
  }
  return false;
}

bool eraseWait(Case& c, std::mt19937& random, NodeKind of) {
  const auto waits =
      find(c.plan, [&](const Instruction& in) { return in.kind == NodeKind::Wait && kindOf(c.plan, in.op) == of; });
  if (waits.empty()) {
    return false;
  }
  erase(c.plan, any(waits, random));
  return true;
}

struct Way {
  Property property;
  const char* what;
  int stage;
  std::set<Property> also;  // other names that the same damage may rightly get
  Mutation mutation;
};

const std::vector<Way>& ways() {
  using P = Property;
  static const std::vector<Way> all = {
      {P::WellFormed,
       "an operation that does not exist",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.op != kNone; }), random);
         c.plan.instructions[at].op = c.plan.ops + static_cast<Index>(random() % 5);
         return true;
       }},
      {P::WellFormed,
       "a second wait",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Wait; }), random);
         const Instruction again = c.plan.instructions[at];
         insert(c.plan, at + 1 + random() % (c.plan.instructions.size() - at), again);
         return true;
       }},
      {P::WellFormed,
       "a gather of what is gathered",
       3,
       {P::PersistentOnce, P::OnDeviceWhenUsed, P::WithinBudget},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Gather; }), random);
         Instruction again = c.plan.instructions[at];
         again.op = c.plan.ops++;
         insert(c.plan, at + 1, again);
         return true;
       }},
      {P::EveryNodeOnce,
       "a node left out",
       3,
       {P::ReducedOnce},
       [](Case& c, std::mt19937& random) {
         erase(c.plan, any(find(c.plan, isNode), random));
         return true;
       }},
      {P::EveryNodeOnce,
       "a node twice",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, isNode), random);
         const Instruction again = c.plan.instructions[at];
         insert(c.plan, at + 1, again);
         return true;
       }},
      {P::DependenciesFirst,
       "two nodes exchanged",
       3,
       {P::EveryNodeOnce},
       [](Case& c, std::mt19937& random) {
         const auto nodes = find(c.plan, isNode);
         const std::size_t i = random() % (nodes.size() - 1);
         std::swap(c.plan.instructions[nodes[i]].node, c.plan.instructions[nodes[i + 1]].node);
         std::swap(c.plan.instructions[nodes[i]].kind, c.plan.instructions[nodes[i + 1]].kind);
         return true;
       }},
      {P::GatheredBeforeUse,
       "a gather left out",
       3,
       {P::KeptUntilLastUse, P::AliasesRespected, P::CopiedBeforeDropped},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Gather; }), random);
         const std::size_t wait = waitOf(c.plan, c.plan.instructions[at].op);
         if (wait < c.plan.instructions.size()) {
           erase(c.plan, wait);
         }
         erase(c.plan, at);
         return true;
       }},
      {P::WaitedBeforeRead,
       "a wait left out",
       3,
       {P::AliasesRespected, P::CopiedBeforeDropped},
       [](Case& c, std::mt19937& random) { return eraseWait(c, random, NodeKind::Gather); }},
      {P::KeptUntilLastUse,
       "a release too early",
       3,
       {P::AliasesRespected, P::WaitedBeforeRead},
       [](Case& c, std::mt19937& random) { return releaseTooEarly(c, random, false); }},
      {P::AliasesRespected,
       "a release before a view is read",
       3,
       {P::WaitedBeforeRead},
       [](Case& c, std::mt19937& random) { return releaseTooEarly(c, random, true); }},
      {P::NeverStale,
       "a release only after the update",
       3,
       {P::SteadyState, P::WithinBudget},
       [](Case& c, std::mt19937& random) {
         const auto releases = find(c.plan, [&](const Instruction& in) {
           return in.kind == NodeKind::Release && c.plan.itemsOf(in)[0].kind == ItemKind::Param &&
                  !c.graph.params[c.plan.itemsOf(in)[0].id].frozen;
         });
         const std::size_t at = any(releases, random);
         const Index param = c.plan.itemsOf(c.plan.instructions[at])[0].id;
         for (std::size_t i = at; i < c.plan.instructions.size(); ++i) {
           const Instruction& in = c.plan.instructions[i];
           if (in.kind == NodeKind::Gather &&
               std::ranges::find(c.plan.itemsOf(in), Item{ItemKind::Param, param}) != c.plan.itemsOf(in).end()) {
             return false;
           }
         }
         move(c.plan, at, c.plan.instructions.size());
         return true;
       }},
      {P::NeverStale,
       "no refresh after an update",
       2,
       {},
       [](Case& c, std::mt19937& random) {
         erase(c.plan, any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Gather; }), random));
         return true;
       }},
      {P::PersistentOnce,
       "a persistent parameter gathered twice",
       3,
       {P::WithinBudget},
       [](Case& c, std::mt19937& random) {
         Index norm = 0;
         while (!c.graph.params[norm].persistent) {
           ++norm;
         }
         const auto uses = find(c.plan, [&](const Instruction& in) { return usesDirectly(c.graph, in, norm); });
         const std::size_t at = uses[random() % (uses.size() - 1)] + 1;
         const auto item = static_cast<Index>(c.plan.items.size());
         c.plan.items.push_back({ItemKind::Param, norm});
         const Index op = c.plan.ops++;
         insert(c.plan, at, {NodeKind::Release, kNone, kNone, item, 1});
         insert(c.plan, at + 1, {NodeKind::Gather, kNone, op, item, 1});
         insert(c.plan, at + 2, {NodeKind::Wait, kNone, op, 0, 0});
         return true;
       }},
      {P::ReducedOnce,
       "a reduction left out",
       3,
       {P::WithinBudget},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Reduce; }), random);
         erase(c.plan, waitOf(c.plan, c.plan.instructions[at].op));
         erase(c.plan, at);
         return true;
       }},
      {P::ReducedOnce,
       "a gradient reduced twice",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         const auto at = any(find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Reduce; }), random);
         Instruction again = c.plan.instructions[at];
         again.op = c.plan.ops++;
         insert(c.plan, at + 1, again);
         insert(c.plan, at + 2, {NodeKind::Wait, kNone, again.op, 0, 0});
         return true;
       }},
      {P::ReducedOnce,
       "ZeRO-1 reduced in every micro-batch",
       1,
       {},
       [](Case& c, std::mt19937& random) {
         const auto nodes =
             find(c.plan, [&](const Instruction& in) { return isNode(in) && !c.graph.nodes[in.node].grads.empty(); });
         const std::size_t at = nodes[random() % nodes.size()];
         const Index param = c.graph.nodes[c.plan.instructions[at].node].grads[0];
         const auto item = static_cast<Index>(c.plan.items.size());
         c.plan.items.push_back({ItemKind::Param, param});
         const Index op = c.plan.ops++;
         insert(c.plan, at + 1, {NodeKind::Reduce, kNone, op, item, 1});
         insert(c.plan, at + 2, {NodeKind::Wait, kNone, op, 0, 0});
         return true;
       }},
      {P::ReducedBeforeUpdate,
       "an update that does not wait",
       3,
       {P::WithinBudget},
       [](Case& c, std::mt19937& random) {
         const auto waits = find(c.plan, [&](const Instruction& in) {
           return in.kind == NodeKind::Wait && kindOf(c.plan, in.op) == NodeKind::Reduce;
         });
         move(c.plan, any(waits, random), c.plan.instructions.size());
         return true;
       }},
      {P::OnDeviceWhenUsed,
       "a reload that nobody waits for",
       3,
       {P::AliasesRespected, P::CopiedBeforeDropped},
       [](Case& c, std::mt19937& random) { return eraseWait(c, random, NodeKind::Reload); }},
      {P::OnDeviceWhenUsed,
       "a reload left out",
       3,
       {P::AliasesRespected, P::CopiedBeforeDropped},
       [](Case& c, std::mt19937& random) {
         const auto reloads = find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Reload; });
         if (reloads.empty()) {
           return false;
         }
         const std::size_t at = any(reloads, random);
         erase(c.plan, waitOf(c.plan, c.plan.instructions[at].op));
         erase(c.plan, at);
         return true;
       }},
      {P::CopiedBeforeDropped,
       "memory given back before the copy is done",
       3,
       {P::WithinBudget, P::OnDeviceWhenUsed, P::SteadyState},
       [](Case& c, std::mt19937& random) { return eraseWait(c, random, NodeKind::Offload); }},
      {P::SteadyState,
       "a state that does not return to the host",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         std::vector<std::size_t> last;
         for (const std::size_t at : find(c.plan, [](const Instruction& in) { return in.kind == NodeKind::Offload; })) {
           const Item item = c.plan.itemsOf(c.plan.instructions[at])[0];
           if (std::ranges::find(c.plan.start_on_host, item) != c.plan.start_on_host.end()) {
             last.push_back(at);
           }
         }
         if (last.empty()) {
           return false;
         }
         const std::size_t at = any(last, random);
         erase(c.plan, waitOf(c.plan, c.plan.instructions[at].op));
         erase(c.plan, at);
         return true;
       }},
      {P::SteadyState,
       "a frozen parameter never released",
       3,
       {P::WellFormed, P::WithinBudget, P::CopiedBeforeDropped},
       [](Case& c, std::mt19937& random) {
         const auto releases = find(c.plan, [&](const Instruction& in) {
           return in.kind == NodeKind::Release && c.plan.itemsOf(in)[0].kind == ItemKind::Param &&
                  c.graph.params[c.plan.itemsOf(in)[0].id].frozen;
         });
         if (releases.empty()) {
           return false;
         }
         erase(c.plan, any(releases, random));
         return true;
       }},
      {P::WithinBudget,
       "a budget below the peak",
       3,
       {},
       [](Case& c, std::mt19937& random) {
         const Bytes peak = memoryProfile(c.graph, Usage(c.graph), c.plan).peak;
         c.plan.budget = peak - 1 - static_cast<Bytes>(random() % 100);
         return true;
       }},
  };
  return all;
}

TEST(Verifier, CatchesAHundredRandomDamagesOfEveryKind) {
  std::mt19937 random(5);
  std::set<Property> covered;
  for (const Way& way : ways()) {
    int made = 0;
    int named = 0;
    for (int tries = 0; made < 100 && tries < 20000; ++tries) {
      Case c = pool(way.stage)[random() % pool(way.stage).size()];
      if (!way.mutation(c, random)) {
        continue;
      }
      ++made;
      const auto violation = verify(c.graph, c.plan);
      ASSERT_TRUE(violation.has_value()) << way.what << "\n" << print(c.graph) << print(c.graph, c.plan);
      EXPECT_FALSE(violation->reason.empty());
      named += violation->property == way.property ? 1 : 0;
      EXPECT_TRUE(violation->property == way.property || way.also.count(violation->property) != 0)
          << way.what << " was named '" << name(violation->property) << "': " << violation->reason;
    }
    EXPECT_EQ(made, 100) << way.what;
    EXPECT_GT(named, 0) << way.what << " never got its own name";
    covered.insert(way.property);
  }
  covered.insert(Property::SameOnAllRanks);  // the test below
  EXPECT_EQ(covered.size(), 16u) << "every property is damaged by some test";
}

TEST(Verifier, CatchesRanksThatStartCollectivesInAnotherOrder) {
  std::mt19937 random(6);
  for (int i = 0; i < 100; ++i) {
    const Case c = pool(3)[random() % pool(3).size()];
    std::vector<Plan> plans(3, c.plan);
    ASSERT_FALSE(verifyRanks(c.graph, plans).has_value());
    Plan& other = plans[1 + random() % 2];
    const auto collectives =
        find(other, [](const Instruction& in) { return in.kind == NodeKind::Gather || in.kind == NodeKind::Reduce; });
    const std::size_t at = any(collectives, random);
    if (i % 2 == 0) {
      erase(other, at);
    } else {
      other.items[other.instructions[at].first].id ^= 1;
    }
    const auto violation = verifyRanks(c.graph, plans);
    ASSERT_TRUE(violation.has_value());
    EXPECT_EQ(violation->property, Property::SameOnAllRanks);
  }
}

TEST(Verifier, AgreesWithTheMemoryProfileOfEveryStrategy) {
  std::mt19937 random(8);
  for (int i = 0; i < 300; ++i) {
    Case c = pool(1 + i % 3)[random() % pool(1 + i % 3).size()];
    const Bytes peak = memoryProfile(c.graph, Usage(c.graph), c.plan).peak;
    EXPECT_LE(peak, c.plan.budget);
    c.plan.budget = peak;
    EXPECT_FALSE(verify(c.graph, c.plan).has_value());
    c.plan.budget = peak - 1;
    const auto violation = verify(c.graph, c.plan);
    ASSERT_TRUE(violation.has_value());
    EXPECT_EQ(violation->property, Property::WithinBudget);
  }
}

TEST(Verifier, ARefusedPlanNamesTheNodeAndTheReason) {
  std::mt19937 random(9);
  Case c = randomCase(random, 3);
  erase(c.plan, find(c.plan, isNode)[2]);
  try {
    requireValid(c.graph, c.plan);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("never runs"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace dc::plan
