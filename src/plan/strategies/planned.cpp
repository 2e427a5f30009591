#include "deepcompile/plan/strategies/planned.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategies/leaner.h"
#include "deepcompile/plan/strategies/settings_search.h"

namespace dc::plan {
namespace {

// How much more memory than the leanest a plan may need to have fewer collectives, in thousandths: each takes the host
// its time and, where it runs beside compute, some of what compute runs on, neither of which a simulation knows.
constexpr int kWorthFewerCollectives = 20;

// The settings that need the least memory.
Settings leanest(Settings settings) {
  settings.reduce_bucket = 1;
  settings.reserve = 0;
  settings.gather_bucket = 1;
  settings.pending = 0;
  return settings;
}

// Nothing fits: an error that names the least budget for which a plan exists (found by halving) and
// what needs it there.
BudgetError tooSmall(const Problem& problem, const Settings& settings, const Timeline& timeline) {
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

}  // namespace

Bytes leastBudget(const Problem& problem) {
  Settings settings = leanest({});
  settings.stretch = problem.cost.machine().shared_links ? 2000 : 1000;
  const Problem nothing{problem.graph, problem.usage, problem.cost, 0};
  return problem.graph.nodes.empty() ? 0 : tooSmall(nothing, settings, undisturbed(problem.graph)).least;
}

Plan Planned::plan(const Problem& problem) const {
  Trials trials;
  Plan plan = searchPlan(problem, trials).plan;
  plan.effort = trials.effort;
  return plan;
}

Attempt searchPlan(const Problem& problem, Trials& trials) {
  Search search(problem, trials);
  const CostModel& cost = problem.cost;
  const Facts facts(problem);
  Settings settings;
  settings.gather_bucket = cost.saturatingGather();
  settings.reduce_bucket = cost.saturatingReduce();
  settings.reserve = 2 * facts.largest;
  settings.stretch = cost.machine().shared_links ? 2000 : 1000;
  settings.pending = 8 * facts.most_grads;
  // Large graphs get fewer attempts, so that planning stays a matter of a second or two.
  const int most =
      static_cast<int>(std::clamp<std::size_t>(1000000 / std::max<std::size_t>(problem.graph.nodes.size(), 1), 8, 60));
  const Timeline start = search.undisturbed();
  // From several sides: with and without states away, with a long and a short backlog of
  // reductions.
  for (const Bytes room : {Bytes{0}, facts.states}) {
    for (const Bytes pending : {8 * facts.most_grads, facts.most_grads}) {
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
    settings = leanest(settings);
    search.attempt(settings, start);
    if (!search.best()) {
      throw tooSmall(problem, settings, start);
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
  climb(problem, facts, search, most);
  // Climbing ends where no single change of the settings helps; from another start it ends
  // elsewhere.
  constexpr int kClimb = 45;
  const int all = static_cast<int>(std::min<std::size_t>(2000000 / (problem.graph.nodes.size() + 1), 1000)) - most;
  int more = all;
  for (const auto& [room, pending, reserve, bucket] :
       {std::tuple{facts.states, facts.most_grads, facts.largest / 4, Bytes{1}},
        {Bytes{0}, facts.most_grads, facts.largest, Bytes{1}},
        {facts.states / 2, 2 * facts.most_grads, facts.largest / 2, Bytes{1}},
        {facts.states, facts.most_grads / 2, facts.largest / 8, Bytes{8}},
        {facts.states, 4 * facts.most_grads, facts.largest, Bytes{4}},
        {facts.states / 4, facts.most_grads, facts.largest / 8, Bytes{4}}}) {
    if (more < all / 2 || more < kClimb) {
      break;
    }
    more -= kClimb;
    Search other(problem, trials);
    Settings from = settings;
    from.make_room = room;
    from.pending = pending;
    from.reserve = reserve;
    from.gather_bucket *= bucket;
    other.attempt(from, search.best()->timeline);
    other.attempt(from, start);
    if (other.best()) {
      climb(problem, facts, other, kClimb);
      search.take(other);
    }
  }
  // A better plan can be where turning single decisions leads nowhere, a worse one where it leads on: what
  // wandering finds does not replace what climbing found before both are polished.
  Search wandered = search;
  const std::size_t tries = std::min<std::size_t>(2000, 100000 / (problem.graph.nodes.size() + 1));
  std::size_t left = tries;
  polish(problem, search, left);
  // Turning single decisions ends where no single one helps. Other ways of building end elsewhere.
  const Settings settled = search.best()->settings;
  for (const auto& [buckets, reserve, pending] : {std::tuple{true, Bytes{0}, settled.pending},
                                                  {false, Bytes{0}, 8 * facts.most_grads},
                                                  {false, settled.reserve, Bytes{0}},
                                                  {true, facts.largest, Bytes{0}}}) {
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
    Search second(problem, trials);
    second.attempt(other, start);
    if (second.best()) {
      polish(problem, second, left);
      search.take(second);
    }
  }
  kick(problem, search, left);
  if (more >= kClimb) {
    wander(problem, facts, wandered, more);
    left = tries / 2;
    polish(problem, wandered, left);
    search.take(wandered);
  }
  return *search.best();
}

std::size_t bestOf(const std::vector<Rating>& ratings) {
  const Nanos shortest = std::ranges::min(ratings, {}, &Rating::step).step;
  const Nanos limit = shortest + mulDiv(shortest, kWorthLessMemory, 1000);
  std::optional<Bytes> least;
  for (const Rating& one : ratings) {
    if (one.step <= limit) {
      least = std::min(least.value_or(one.peak), one.peak);
    }
  }
  const Bytes most = *least + mulDiv(*least, kWorthFewerCollectives, 1000);
  std::optional<std::size_t> best;
  const auto key = [](const Rating& one) { return std::tuple(one.collectives, one.peak, one.step); };
  for (std::size_t i = 0; i < ratings.size(); ++i) {
    if (ratings[i].step <= limit && ratings[i].peak <= most && (!best || key(ratings[i]) < key(ratings[*best]))) {
      best = i;
    }
  }
  return *best;
}

Plan Auto::plan(const Problem& problem) const {
  Trials trials;
  std::vector<Plan> plans;
  std::vector<Rating> ratings;
  const auto add = [&](Plan plan) {
    const auto collectives = std::ranges::count_if(plan.instructions, [](const Instruction& one) {
      return one.kind == NodeKind::Gather || one.kind == NodeKind::Reduce;
    });
    ratings.push_back({simulate(problem.graph, problem.cost, plan).step,
                       memoryProfile(problem.graph, problem.usage, plan).peak, collectives});
    plans.push_back(std::move(plan));
  };
  std::optional<Attempt> own;
  std::optional<BudgetError> error;
  for (const std::string_view name : {"planned", "published", "per_block", "on_demand"}) {
    try {
      if (name == "planned") {
        own = searchPlan(problem, trials);
      }
      add(name == "planned" ? own->plan : makeStrategy(name)->plan(problem));
    } catch (const BudgetError& failure) {
      if (!error || failure.least < error->least) {
        error = failure;
      }
    }
  }
  if (plans.empty()) {
    throw *error;
  }
  const Nanos shortest = std::ranges::min(ratings, {}, &Rating::step).step;
  const Nanos limit = shortest + mulDiv(shortest, kWorthLessMemory, 1000);
  if (own && own->step <= limit) {
    add(leaner(problem, *own, limit, trials));
  }
  Plan& best = plans[bestOf(ratings)];
  best.effort = trials.effort;
  return std::move(best);
}

}  // namespace dc::plan
