// Small steps are solved exactly here, by trying every decision, and compared with what the planner
// finds. The search lives in this test alone; the planner has no case for small graphs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/lower_bound.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/text.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

struct Instance {
  StepGraph graph;
  Machine machine;
  Bytes budget = 0;
};

// Up to eight gathers: p parameters, used in forward and in backward, for one or two micro-batches. With
// `turn`, the first node of backward takes more memory and time than the others.
Instance randomInstance(std::mt19937& random, bool turn = false) {
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  const int micros = pick(1, 2);
  const int params = micros == 1 ? pick(1, 4) : pick(1, 2);
  std::string text = "graph random\nworld 2\n";
  for (int p = 0; p < params; ++p) {
    text += concat("param p", p, " bytes=", 100 * pick(1, 20), " state=0\n");
  }
  std::string nodes;
  for (int m = 0; m < micros; ++m) {
    for (int p = 0; p < params; ++p) {
      text += concat("buffer a", m, ".", p, " bytes=", 100 * pick(0, 6), "\n");
      nodes += concat("node f", m, ".", p, " compute time=", pick(1, 30), "us micro=", m, " block=", p, " uses=p", p,
                      " makes=a", m, ".", p, "\n");
    }
    for (int p = params - 1; p >= 0; --p) {
      nodes += concat("node b", m, ".", p, " compute time=", pick(1, 40), "us phase=backward micro=", m, " block=", p,
                      " uses=p", p, " grads=p", p, " reads=a", m, ".", p);
      nodes += turn && p == params - 1 ? concat(" workspace=", 100 * pick(5, 40), "\n") : "\n";
    }
  }
  nodes += "node u optimizer time=1us updates=p0";
  for (int p = 1; p < params; ++p) {
    nodes += concat(",p", p);
  }
  Instance instance;
  instance.graph = parseGraph(text + nodes + concat(" micro=", micros - 1, "\n"));
  instance.machine = parseMachine(concat("machine m\ndevices 2\nshared_links no\ninside latency=", pick(0, 8),
                                         "us bandwidth=", pick(10, 100), "MB\n"));
  const Usage usage(instance.graph);
  Bytes least = 0;
  Bytes all = 0;
  for (std::size_t slot = 0; slot < usage.live.size(); ++slot) {
    least = std::max(least, usage.live[slot] + usage.gathered[slot]);
  }
  for (const Param& param : instance.graph.params) {
    all += 2 * param.bytes;
  }
  instance.budget = least + all * pick(0, 10) / 10;
  return instance;
}

// Walks the step slot by slot and branches on every decision: what to gather now and in which
// buckets, what to keep after a use, when to close a bucket of gradients. Gathers start in the
// order of their use: an exchange of two neighbours on one channel never makes the step shorter.
// Times follow the simulator's rules for links that are not shared.
class Exhaustive {
 public:
  Exhaustive(const Instance& instance, Nanos upper)
      : graph_(instance.graph),
        usage_(instance.graph),
        cost_(instance.machine, 2),
        budget_(instance.budget),
        best_(upper) {
    rest_.assign(graph_.nodes.size() + 1, 0);
    for (std::size_t k = graph_.nodes.size(); k-- > 0;) {
      rest_[k] = rest_[k + 1] + graph_.nodes[k].time;
    }
  }

  Nanos solve() {
    State state;
    state.ready.assign(graph_.params.size(), kGone);
    at(0, state);
    return best_;
  }
  long visited() const { return visited_; }

 private:
  static constexpr Nanos kGone = -1;
  struct Flight {
    Nanos end;
    Bytes bytes;
  };
  struct State {
    Nanos now = 0;
    Nanos gather_free = 0;
    Nanos reduce_free = 0;
    std::vector<Nanos> ready;  // by parameter: when its gather ends, kGone when it is not gathered
    Bytes gathered = 0;
    Bytes open = 0;               // gradients that no reduction has taken
    std::vector<Flight> flights;  // reductions that are not waited for
  };

  Bytes flying(const State& state) const {
    Bytes bytes = 0;
    for (const Flight& flight : state.flights) {
      bytes += flight.bytes;
    }
    return bytes;
  }

  // Waits for reductions, oldest first, until slot k and `more` bytes fit. False when they never
  // do.
  bool makeRoom(State& state, std::size_t k, Bytes more) const {
    const auto done = [&] {
      while (!state.flights.empty() && state.flights.front().end <= state.now) {
        state.flights.erase(state.flights.begin());
      }
    };
    done();
    while (usage_.live[k] + state.gathered + more + state.open + flying(state) > budget_) {
      if (state.flights.empty()) {
        return false;
      }
      state.now = std::max(state.now, state.flights.front().end);
      done();
    }
    return true;
  }

  void at(std::size_t k, const State& state) {
    ++visited_;
    if (state.now + rest_[k] >= best_) {
      return;
    }
    if (k == graph_.nodes.size()) {
      best_ = std::max({state.now, state.gather_free, state.reduce_free}) < best_
                  ? std::max({state.now, state.gather_free, state.reduce_free})
                  : best_;
      return;
    }
    // A bucket of gradients is closed here or stays open; it must be closed before the next
    // micro-batch contributes.
    const bool must_close =
        k > 0 && (graph_.nodes[k].kind == NodeKind::Optimizer || graph_.nodes[k].micro != graph_.nodes[k - 1].micro);
    for (const bool close : {true, false}) {
      if ((close && state.open == 0) || (!close && must_close && state.open > 0)) {
        continue;
      }
      State next = state;
      if (close) {
        next.reduce_free = std::max(next.reduce_free, next.now) + cost_.reduce(next.open);
        next.flights.push_back({next.reduce_free, next.open});
        next.open = 0;
      }
      launches(k, next);
    }
  }

  void launches(std::size_t k, const State& state) {
    // What is not here, in the order of its next use.
    std::vector<Index> missing;
    for (std::size_t s = k; s < graph_.nodes.size(); ++s) {
      for (const Index param : usage_.needs[s]) {
        if (state.ready[param] == kGone && std::find(missing.begin(), missing.end(), param) == missing.end()) {
          missing.push_back(param);
        }
      }
    }
    const std::size_t needed = usage_.needs[k].empty() || state.ready[usage_.needs[k][0]] != kGone ? 0 : 1;
    Bytes bytes = 0;
    for (std::size_t count = 0; count <= missing.size(); ++count) {
      bytes += count > 0 ? graph_.params[missing[count - 1]].bytes : 0;
      if (count < needed) {
        continue;
      }
      State roomy = state;
      if (!makeRoom(roomy, k, bytes)) {
        break;
      }
      // Every way of cutting the gathers into buckets: bit i starts a new bucket before gather i
      // + 1.
      for (std::uint32_t cuts = 0; cuts < (count > 1 ? 1u << (count - 1) : 1u); ++cuts) {
        State next = roomy;
        std::size_t begin = 0;
        for (std::size_t i = 1; i <= count; ++i) {
          if (i == count || (cuts >> (i - 1) & 1) != 0) {
            Bytes bucket = 0;
            for (std::size_t j = begin; j < i; ++j) {
              bucket += graph_.params[missing[j]].bytes;
            }
            next.gather_free = std::max(next.gather_free, next.now) + cost_.gather(bucket);
            for (std::size_t j = begin; j < i; ++j) {
              next.ready[missing[j]] = next.gather_free;
            }
            begin = i;
          }
        }
        next.gathered += bytes;
        run(k, next);
      }
    }
  }

  void run(std::size_t k, State state) {
    const Node& node = graph_.nodes[k];
    for (const Index param : usage_.needs[k]) {
      state.now = std::max(state.now, state.ready[param]);
    }
    if (node.kind == NodeKind::Optimizer) {
      state.now = std::max(state.now, state.reduce_free);
      state.flights.clear();
    }
    state.now += node.time;
    for (const Index param : node.grads) {
      state.open += graph_.params[param].grad;
    }
    if (usage_.needs[k].empty()) {
      at(k + 1, state);
      return;
    }
    const Index param = usage_.needs[k][0];
    const bool again = usage_.uses[param].back() > static_cast<Index>(k);
    for (const bool keep : {true, false}) {
      if (keep && !again) {
        continue;
      }
      State next = state;
      if (!keep) {
        next.ready[param] = kGone;
        next.gathered -= graph_.params[param].bytes;
      }
      at(k + 1, next);
    }
  }

  const StepGraph& graph_;
  Usage usage_;
  CostModel cost_;
  Bytes budget_;
  Nanos best_;
  std::vector<Nanos> rest_;
  long visited_ = 0;
};

TEST(Exhaustive, PlannedIsWithinFivePercentOfTheOptimumInEveryOneOf500RandomSteps) {
  std::mt19937 random(20261115);
  int equal = 0;
  int within_one = 0;
  double worst = 1;
  long visited = 0;
  for (int i = 0; i < 500; ++i) {
    const Instance instance = randomInstance(random);
    const Usage usage(instance.graph);
    const CostModel cost(instance.machine, 2);
    const Plan plan = makeStrategy("planned")->plan({instance.graph, usage, cost, instance.budget});
    ASSERT_FALSE(verify(instance.graph, plan).has_value());
    const Nanos planned = simulate(instance.graph, cost, plan).step;
    Exhaustive search(instance, planned + 1);
    const Nanos optimum = search.solve();
    visited += search.visited();
    ASSERT_GE(planned, optimum);
    ASSERT_LE(lowerBound(instance.graph, usage, cost, instance.budget).best, optimum) << print(instance.graph);
    const double ratio = static_cast<double>(planned) / static_cast<double>(optimum);
    equal += planned == optimum ? 1 : 0;
    within_one += ratio <= 1.01 ? 1 : 0;
    if (ratio > worst && std::getenv("SHOW_WORST") != nullptr) {
      std::printf("%s%sbudget %lld\nplanned %lld optimum %lld\n%s\n", print(instance.graph).c_str(),
                  print(instance.machine).c_str(), static_cast<long long>(instance.budget),
                  static_cast<long long>(planned), static_cast<long long>(optimum),
                  print(instance.graph, plan).c_str());
    }
    worst = std::max(worst, ratio);
    EXPECT_LE(planned * 100, optimum * 105) << "instance " << i;
  }
  std::printf("equal to the optimum: %d of 500; within 1 %%: %d; worst ratio %.4f; %ld states searched\n", equal,
              within_one, worst, visited);
  EXPECT_GT(equal, 250);
}

TEST(Exhaustive, TheLowerBoundIsAtMostTheOptimumWhereMemoryIsFullestAtTheTurn) {
  std::mt19937 random(4711);
  int tight = 0;
  for (int i = 0; i < 200; ++i) {
    const Instance instance = randomInstance(random, true);
    const Usage usage(instance.graph);
    const CostModel cost(instance.machine, 2);
    const Plan plan = makeStrategy("planned")->plan({instance.graph, usage, cost, instance.budget});
    Exhaustive search(instance, simulate(instance.graph, cost, plan).step + 1);
    const Nanos optimum = search.solve();
    const Nanos bound = lowerBound(instance.graph, usage, cost, instance.budget).best;
    ASSERT_LE(bound, optimum) << print(instance.graph) << print(instance.machine) << instance.budget;
    tight += bound * 100 >= optimum * 95 ? 1 : 0;
  }
  std::printf("the bound is within 5 %% of the optimum in %d of 200\n", tight);
}

}  // namespace
}  // namespace dc::plan
