#include "deepcompile/plan/strategies/schedule_search.h"

#include <algorithm>

namespace dc::plan {
namespace {

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
    const auto exposed =
        static_cast<std::int32_t>(duration == 0 ? 0 : std::min<Nanos>(1000, mulDiv(1000, stalls, duration)));
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

// The times as they turned out, but for the stalls on copies: whoever plans the copies by times that
// contain those stalls plans the same stalls again.
Timeline observed(const Problem& problem, const Plan& plan, const Simulation& run) {
  Timeline timeline;
  timeline.reach.assign(problem.graph.nodes.size() + 1, 0);
  std::vector<char> copies(static_cast<std::size_t>(plan.ops), 0);
  Nanos stalled = 0;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& in = plan.instructions[i];
    if (in.kind == NodeKind::Offload || in.kind == NodeKind::Reload) {
      copies[in.op] = 1;
    } else if (in.kind == NodeKind::Wait && copies[in.op] != 0) {
      stalled += run.end[i] - run.start[i];
    } else if (in.node != kNone) {
      timeline.reach[in.node + 1] = run.end[i] - stalled;
    }
  }
  timeline.weight = weigh(problem, plan, run);
  timeline.key = keyOf(timeline);
  return timeline;
}

}  // namespace

Timeline undisturbed(const StepGraph& graph) {
  Timeline timeline;
  timeline.reach.reserve(graph.nodes.size() + 1);
  Nanos now = 0;
  timeline.reach.push_back(now);
  for (const Node& node : graph.nodes) {
    now += node.time;
    timeline.reach.push_back(now);
  }
  timeline.key = keyOf(timeline);
  return timeline;
}

Search::Search(const Problem& problem, Trials& trials)
    : problem_(problem), trials_(&trials), undisturbed_(plan::undisturbed(problem.graph)) {}

bool Search::attempt(const Settings& settings, const Timeline& timeline, const Overrides& overrides) {
  ++attempts_;
  const Nanos limit = best_ ? best_->step : kNoLimit;
  const std::uint64_t inputs = inputsOf(problem_, settings, timeline, overrides);
  if (trials_->least(inputs, settings) >= limit) {
    return false;
  }
  ++trials_->effort.builds;
  Schedule schedule;
  ScheduleBuilder builder(problem_, settings, timeline, overrides);
  try {
    schedule = builder.build();
  } catch (const BudgetError&) {
    trials_->effort.memory += builder.memoryWork();
    trials_->add(inputs, builder.leeway(), kNoLimit);
    return false;  // these settings do not fit; others may
  }
  trials_->effort.memory += builder.memoryWork();
  Nanos& least = trials_->least(keyOf(schedule));
  if (least >= limit) {
    trials_->add(inputs, builder.leeway(), least);
    return false;
  }
  Attempt made;
  made.plan = emit(problem_, schedule, "planned");
  const Simulation run = simulate(problem_.graph, problem_.cost, made.plan, limit);
  ++trials_->effort.simulations;
  trials_->effort.events += run.events;
  least = run.step;
  trials_->add(inputs, builder.leeway(), least);
  if (run.step >= limit) {
    return false;
  }
  made.step = run.step;
  made.settings = settings;
  made.input = timeline;
  made.overrides = overrides;
  made.timeline = observed(problem_, made.plan, run);
  best_ = std::move(made);
  return true;
}

void Search::take(const Search& other) {
  if (other.best_->step < best_->step) {
    best_ = other.best_;
  }
}

}  // namespace dc::plan
