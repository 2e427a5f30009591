#include "deepcompile/plan/strategies/planned.h"

#include <algorithm>
#include <optional>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {
namespace {

struct Attempt {
  Settings settings;
  Plan plan;
  Nanos step = 0;
  Timeline timeline;  // as simulated
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
  bool attempt(const Settings& settings, const Timeline& timeline) {
    ++attempts_;
    try {
      Attempt made;
      made.settings = settings;
      made.plan = emit(problem_, ScheduleBuilder(problem_, settings, timeline).build(), "planned");
      const Simulation run = simulate(problem_.graph, problem_.cost, made.plan);
      made.step = run.step;
      if (best_ && best_->step <= made.step) {
        return false;
      }
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
      1000000 / std::max<std::size_t>(problem.graph.nodes.size(), 1), 8, 40));
  const Timeline start = search.undisturbedTimeline();
  search.attempt(settings, start);
  if (!search.best()) {
    settings.reduce_bucket = 1;
    settings.reserve = 0;
    settings.gather_bucket = 1;
    search.attempt(settings, start);
    if (!search.best()) {
      throw *search.error();
    }
  }
  // One thing at a time, for as long as it helps.
  const auto vary = [&](auto change) {
    bool helped = false;
    for (int i = 0; i < 2 && search.attempts() < most; ++i) {
      Settings other = search.best()->settings;
      change(other);
      if (!search.attempt(other, start)) {
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
    vary([&](Settings& s) { s.pending /= 4; });
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
  if (getenv("TUNE")) {
    auto& b = search.best()->settings;
    fprintf(stderr,
            "attempts %d reserve %.2f gb %.1f rb %.1f pending %.2f stretch %d room %.2f each %s\n",
            search.attempts(), (double)b.reserve / largest,
            (double)b.gather_bucket / cost.saturatingGather(),
            (double)b.reduce_bucket / cost.saturatingReduce(), (double)b.pending / most_grads,
            b.stretch, (double)b.make_room / states, std::to_string(b.make_room_each).c_str());
  }
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
