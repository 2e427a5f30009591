#include "deepcompile/plan/strategies/planned.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {
namespace {

struct Attempt {
  Settings settings;
  Plan plan;
  Nanos step = 0;
  Timeline input;     // what it was built for
  Timeline timeline;  // as simulated
  Overrides overrides;
};

// When each position is reached if nothing ever waits.
Timeline undisturbed(const StepGraph& graph) {
  Timeline timeline;
  timeline.reach.reserve(graph.nodes.size() + 1);
  Nanos now = 0;
  timeline.reach.push_back(now);
  for (const Node& node : graph.nodes) {
    now += node.time;
    timeline.reach.push_back(now);
  }
  return timeline;
}

// What the simulation says about each use: by how much its gather, or one in its place, delays the
// step.
std::vector<std::int32_t> weigh(const Problem& problem, const Plan& plan, const Simulation& run) {
  const StepGraph& graph = problem.graph;
  const int slowdown = problem.cost.machine().slowdown;
  const auto hidden = static_cast<std::int32_t>(std::max(1, 1000 * slowdown / (1000 + slowdown)));
  struct Gather {
    Index instruction;
    Index first = kNone;  // slot
  };
  std::vector<Gather> gathers;
  std::vector<Index> gather_of(static_cast<std::size_t>(plan.ops), kNone);
  Index slot = 0;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& in = plan.instructions[i];
    if (in.node != kNone) {
      slot = in.node + 1;
    } else if (in.kind == NodeKind::Gather) {
      gather_of[in.op] = static_cast<Index>(gathers.size());
      gathers.push_back({static_cast<Index>(i)});
    } else if (in.kind == NodeKind::Wait && gather_of[in.op] != kNone) {
      gathers[gather_of[in.op]].first = slot;
    }
  }
  // A gather delays every later one of the same busy stretch of the channel, and with it what waits
  // for that.
  std::vector<std::int32_t> by_slot(graph.nodes.size() + 1, 0);
  Nanos stalls = 0;
  Nanos next_start = 0;
  for (std::size_t g = gathers.size(); g-- > 0;) {
    const Index at = gathers[g].instruction;
    const Nanos duration = run.end[at] - run.start[at];
    if (run.end[at] < next_start) {
      stalls = 0;
    }
    next_start = run.start[at];
    stalls += run.stall[plan.instructions[at].op];
    const auto exposed = static_cast<std::int32_t>(
        duration == 0 ? 0 : std::min<Nanos>(1000, mulDiv(1000, stalls, duration)));
    if (gathers[g].first != kNone) {
      std::int32_t& weight = by_slot[gathers[g].first];
      weight = std::max({weight, exposed, hidden});
    }
  }
  // A use that was kept gathered would be gathered just before the next one that is not.
  std::int32_t near = hidden;
  for (std::size_t s = by_slot.size(); s-- > 0;) {
    near = by_slot[s] != 0 ? by_slot[s] : near;
    by_slot[s] = near;
  }
  std::vector<std::int32_t> weights;
  for (std::size_t p = 0; p < graph.params.size(); ++p) {
    for (const Index use : problem.usage.uses[p]) {
      weights.push_back(by_slot[use]);
    }
  }
  return weights;
}

Timeline observed(const Problem& problem, const Plan& plan, const Simulation& run) {
  Timeline timeline;
  timeline.reach.assign(problem.graph.nodes.size() + 1, 0);
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    if (plan.instructions[i].node != kNone) {
      timeline.reach[plan.instructions[i].node + 1] = run.end[i];
    }
  }
  timeline.weight = weigh(problem, plan, run);
  return timeline;
}

// Tries settings, keeps the best.
class Search {
 public:
  explicit Search(const Problem& problem)
      : problem_(problem), undisturbed_(undisturbed(problem.graph)) {}

  // True when this became the best.
  bool attempt(const Settings& settings, const Timeline& timeline,
               const Overrides& overrides = {}) {
    ++attempts_;
    try {
      Attempt made;
      made.settings = settings;
      made.plan = emit(problem_, ScheduleBuilder(problem_, settings, timeline, overrides).build(),
                       "planned");
      const Simulation run = simulate(problem_.graph, problem_.cost, made.plan);
      made.step = run.step;
      if (best_ && best_->step <= made.step) {
        return false;
      }
      made.input = timeline;
      made.overrides = overrides;
      made.timeline = observed(problem_, made.plan, run);
      best_ = std::move(made);
      return true;
    } catch (const BudgetError& error) {
      if (!error_ || error.least < error_->least) {
        error_ = error;
      }
      return false;
    }
  }

  // Takes over the other search's best if that is better.
  void take(const Search& other) {
    if (other.best_->step < best_->step) {
      best_ = other.best_;
    }
  }

  int attempts() const { return attempts_; }
  const Timeline& undisturbedTimeline() const { return undisturbed_; }
  const std::optional<Attempt>& best() const { return best_; }
  const std::optional<BudgetError>& error() const { return error_; }

 private:
  const Problem& problem_;
  Timeline undisturbed_;
  int attempts_ = 0;
  std::optional<Attempt> best_;
  std::optional<BudgetError> error_;
};

// Nothing fits: an error that names the least budget for which a plan exists (found by halving) and
// what needs it there.
BudgetError leastBudget(const Problem& problem, const Settings& settings,
                        const Timeline& timeline) {
  const auto attempt = [&](Bytes budget) -> std::optional<BudgetError> {
    const Problem other{problem.graph, problem.usage, problem.cost, budget};
    try {
      ScheduleBuilder(other, settings, timeline, {}).build();
      return std::nullopt;
    } catch (const BudgetError& error) {
      return error;
    }
  };
  Bytes low = problem.budget;
  Bytes high = std::max<Bytes>(2 * problem.budget, 1);
  while (attempt(high)) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) {
    const Bytes middle = low + (high - low) / 2;
    (attempt(middle) ? low : high) = middle;
  }
  const BudgetError reason = *attempt(low);
  return BudgetError(concat("a budget of ", problem.budget, " bytes is too small: at least ", high,
                            " bytes are needed. With ", low, ": ", reason.what()),
                     high);
}

// Single decisions, turned one by one where that makes the step shorter: what stays gathered, which
// gathers share a bucket, where gradients are flushed. How many are tried depends on the size of
// the graph, so that planning stays near-linear.
void polish(const Problem& problem, Search& search, std::size_t& left) {
  const std::size_t slots = problem.graph.nodes.size();
  std::size_t uses = 0;
  for (std::size_t p = 0; p < problem.graph.params.size(); ++p) {
    uses += problem.usage.uses[p].size();
  }
  Overrides trial = search.best()->overrides;
  trial.keep.resize(uses, Overrides::Free);
  trial.join.resize(uses, Overrides::Free);
  trial.flush.resize(slots, Overrides::Free);
  trial.settle.resize(slots, Overrides::Free);
  bool improved = true;
  while (improved && left > 0) {
    improved = false;
    for (auto* choices : {&trial.keep, &trial.join, &trial.flush, &trial.settle}) {
      for (std::size_t i = 0; i < choices->size() && left > 0; ++i) {
        if (choices == &trial.flush && problem.graph.nodes[i].grads.empty()) {
          continue;
        }
        const Overrides::Choice before = (*choices)[i];
        for (const Overrides::Choice other : {Overrides::Yes, Overrides::No, Overrides::Free}) {
          if (other == before || left == 0) {
            continue;
          }
          --left;
          (*choices)[i] = other;
          const Settings settings = search.best()->settings;
          const Timeline timeline = search.best()->input;
          if (search.attempt(settings, timeline, trial)) {
            improved = true;
            break;
          }
          (*choices)[i] = before;
        }
      }
    }
  }
}

// What no single turn improves, two or three turns at once may. The sequence of tries is the same
// in every run.
void kick(const Problem& problem, Search& search, std::size_t& left) {
  std::uint64_t random = 88172645463325252ull;
  const auto below = [&](std::size_t bound) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<std::size_t>(random % bound);
  };
  while (left > 0) {
    Overrides trial = search.best()->overrides;
    if (trial.keep.empty() || trial.flush.empty()) {
      return;
    }
    for (std::size_t turns = 2 + below(3); turns > 0; --turns) {
      std::vector<Overrides::Choice>* choices[] = {&trial.keep, &trial.join, &trial.flush,
                                                   &trial.settle};
      std::vector<Overrides::Choice>& list = *choices[below(4)];
      list[below(list.size())] = static_cast<Overrides::Choice>(below(3));
    }
    Search second(problem);
    const Settings settings = search.best()->settings;
    --left;
    second.attempt(settings, search.best()->input, trial);
    if (second.best()) {
      polish(problem, second, left);
      search.take(second);
    }
  }
}

}  // namespace

Plan Planned::plan(const Problem& problem) const {
  Search search(problem);
  const CostModel& cost = problem.cost;
  Bytes largest = 0;
  Bytes states = 0;
  for (std::size_t slot = 0; slot < problem.graph.nodes.size(); ++slot) {
    largest = std::max(largest, problem.usage.gathered[slot]);
  }
  for (const Param& param : problem.graph.params) {
    states += param.state;
  }
  Settings settings;
  settings.gather_bucket = cost.saturatingGather();
  settings.reduce_bucket = cost.saturatingReduce();
  settings.reserve = 2 * largest;
  settings.stretch = cost.machine().shared_links ? 2000 : 1000;
  Bytes most_grads = settings.reduce_bucket;
  for (const Node& node : problem.graph.nodes) {
    Bytes bytes = 0;
    for (const Index param : node.grads) {
      bytes += problem.graph.params[param].grad;
    }
    most_grads = std::max(most_grads, bytes);
  }
  settings.pending = 8 * most_grads;
  // Large graphs get fewer attempts, so that planning stays a matter of a second or two.
  const int most = static_cast<int>(std::clamp<std::size_t>(
      1000000 / std::max<std::size_t>(problem.graph.nodes.size(), 1), 8, 60));
  const Timeline start = search.undisturbedTimeline();
  // From several sides: with and without states away, with a long and a short backlog of
  // reductions.
  for (const Bytes room : {Bytes{0}, states}) {
    for (const Bytes pending : {8 * most_grads, most_grads}) {
      Settings other = settings;
      other.make_room = room;
      other.pending = pending;
      search.attempt(other, start);
      if (room > 0 && search.best()) {
        search.attempt(other, Timeline(search.best()->timeline));
      }
    }
  }
  if (!search.best()) {
    settings.reduce_bucket = 1;
    settings.reserve = 0;
    settings.gather_bucket = 1;
    settings.pending = 0;
    search.attempt(settings, start);
    if (!search.best()) {
      throw leastBudget(problem, settings, start);
    }
  }
  // Without buckets: less latency hidden, but nothing waits for its neighbours.
  for (const bool gathers : {false, true}) {
    Settings other = search.best()->settings;
    (gathers ? other.gather_bucket : other.reduce_bucket) = 1;
    if (search.attempts() < most) {
      search.attempt(other, start);
    }
  }
  // One thing at a time, for as long as it helps.
  const auto vary = [&](auto change) {
    bool helped = false;
    for (int i = 0; i < 3 && search.attempts() < most; ++i) {
      Settings other = search.best()->settings;
      change(other);
      // Once by the times of the best plan so far, once by those of a step without stalls: in a
      // step that waits for its links, the first say better when a copy or a gather must start;
      // else the second.
      const bool better =
          search.attempt(other, Timeline(search.best()->timeline)) || search.attempt(other, start);
      if (!better) {
        return helped;
      }
      helped = true;
    }
    return helped;
  };
  const auto crossing = [&](std::int64_t bandwidth) {
    return mulDiv(search.best()->step / 2, bandwidth, 1000000000);
  };
  const auto micros =
      static_cast<Bytes>(problem.graph.nodes.empty() ? 1 : problem.graph.nodes.back().micro + 1);
  for (int round = 0; round < 2; ++round) {
    vary([&](Settings& s) {
      s.make_room = s.make_room == 0
                        ? std::min(states, crossing(cost.machine().to_device.bandwidth))
                        : s.make_room / 2;
    });
    vary([&](Settings& s) { s.gather_bucket *= 4, s.reduce_bucket *= 2; });
    vary([&](Settings& s) { s.reserve /= 2; }) || vary([&](Settings& s) { s.reserve *= 2; });
    vary([&](Settings& s) {
      s.make_room_each = s.make_room_each == 0
                             ? crossing(cost.machine().to_host.bandwidth) / (2 * micros)
                             : s.make_room_each / 2;
    });
    vary([&](Settings& s) { s.pending /= 2; }) || vary([&](Settings& s) { s.pending *= 2; });
    vary([&](Settings& s) { s.reduce_bucket *= 2; }) ||
        vary([&](Settings& s) { s.reduce_bucket /= 2; });
    vary([&](Settings& s) { s.gather_bucket /= 2; });
    vary([&](Settings& s) { s.stretch /= 2; }) || vary([&](Settings& s) { s.stretch *= 2; });
    // Once more with the times as they turned out: what is exposed is known now.
    if (search.attempts() < most) {
      search.attempt(search.best()->settings, Timeline(search.best()->timeline));
    }
  }
  std::size_t left = std::min<std::size_t>(2000, 100000 / (problem.graph.nodes.size() + 1));
  polish(problem, search, left);
  // Turning single decisions ends where no single one helps. Other ways of building end elsewhere.
  const Settings settled = search.best()->settings;
  for (const auto& [buckets, reserve, pending] : {std::tuple{true, Bytes{0}, settled.pending},
                                                  {false, Bytes{0}, 8 * most_grads},
                                                  {false, settled.reserve, Bytes{0}},
                                                  {true, largest, Bytes{0}}}) {
    if (left == 0) {
      break;
    }
    Settings other = settled;
    other.reserve = reserve;
    other.pending = pending;
    other.stretch = 4 * settled.stretch;
    if (!buckets) {
      other.gather_bucket = 1;
      other.reduce_bucket = 1;
    }
    Search second(problem);
    second.attempt(other, start);
    if (second.best()) {
      polish(problem, second, left);
      search.take(second);
    }
  }
  kick(problem, search, left);
  return search.best()->plan;
}

Plan Auto::plan(const Problem& problem) const {
  std::optional<Plan> best;
  std::optional<BudgetError> error;
  Nanos step = 0;
  Bytes peak = 0;
  for (const std::string_view name : {"planned", "published", "per_block", "on_demand"}) {
    try {
      Plan plan = makeStrategy(name)->plan(problem);
      const Nanos time = simulate(problem.graph, problem.cost, plan).step;
      const Bytes memory = memoryProfile(problem.graph, problem.usage, plan).peak;
      if (!best || time < step || (time == step && memory < peak)) {
        best = std::move(plan);
        step = time;
        peak = memory;
      }
    } catch (const BudgetError& failure) {
      if (!error || failure.least < error->least) {
        error = failure;
      }
    }
  }
  if (!best) {
    throw *error;
  }
  return *std::move(best);
}

}  // namespace dc::plan
