#include "deepcompile/plan/strategies/planned.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategies/schedule_search.h"

namespace dc::plan {
namespace {

// Nothing fits: an error that names the least budget for which a plan exists (found by halving) and
// what needs it there.
BudgetError leastBudget(const Problem& problem, const Settings& settings, const Timeline& timeline) {
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

// What the settings are measured by.
struct Facts {
  explicit Facts(const Problem& problem) : most_grads(problem.cost.saturatingReduce()) {
    for (std::size_t slot = 0; slot < problem.graph.nodes.size(); ++slot) {
      largest = std::max(largest, problem.usage.gathered[slot]);
      Bytes bytes = 0;
      for (const Index param : problem.graph.nodes[slot].grads) {
        bytes += problem.graph.params[param].grad;
      }
      most_grads = std::max(most_grads, bytes);
      micros = std::max<Bytes>(micros, problem.graph.nodes[slot].micro + 1);
    }
    for (const Param& param : problem.graph.params) {
      states += param.state;
    }
  }
  Bytes largest = 0;  // gathered for one node
  Bytes most_grads;   // made by one node, or a saturating bucket
  Bytes states = 0;
  Bytes micros = 1;
};

// Changes the settings of the best plan so far, one thing at a time, for as long as it helps.
void climb(const Problem& problem, const Facts& facts, Search& search, int most) {
  const CostModel& cost = problem.cost;
  const Timeline& start = search.undisturbed();
  const auto vary = [&](auto change) {
    bool helped = false;
    for (int i = 0; i < 3 && search.attempts() < most; ++i) {
      Settings other = search.best()->settings;
      change(other);
      // Once by the times of the best plan so far, once by those of a step without stalls: in a
      // step that waits for its links, the first say better when a copy or a gather must start;
      // else the second.
      const bool better = search.attempt(other, Timeline(search.best()->timeline)) || search.attempt(other, start);
      if (!better) {
        return helped;
      }
      helped = true;
    }
    return helped;
  };
  const auto crossing = [&](std::int64_t bandwidth) { return mulDiv(search.best()->step / 2, bandwidth, 1000000000); };
  for (int round = 0; round < 2; ++round) {
    vary([&](Settings& s) {
      s.make_room =
          s.make_room == 0 ? std::min(facts.states, crossing(cost.machine().to_device.bandwidth)) : s.make_room / 2;
    });
    vary([&](Settings& s) { s.farthest = !s.farthest; });
    vary([&](Settings& s) { s.gather_bucket *= 4, s.reduce_bucket *= 2; });
    vary([&](Settings& s) { s.reserve /= 2; }) || vary([&](Settings& s) { s.reserve *= 2; });
    vary([&](Settings& s) {
      s.make_room_each = s.make_room_each == 0 ? crossing(cost.machine().to_host.bandwidth) / (2 * facts.micros)
                                               : s.make_room_each / 2;
    });
    vary([&](Settings& s) { s.pending /= 2; }) || vary([&](Settings& s) { s.pending *= 2; });
    vary([&](Settings& s) { s.reduce_bucket *= 2; }) || vary([&](Settings& s) { s.reduce_bucket /= 2; });
    vary([&](Settings& s) { s.gather_bucket /= 2; });
    vary([&](Settings& s) { s.stretch /= 2; }) || vary([&](Settings& s) { s.stretch *= 2; });
    // Once more with the times as they turned out: what is exposed is known now.
    if (search.attempts() < most) {
      search.attempt(search.best()->settings, Timeline(search.best()->timeline));
    }
  }
}

}  // namespace

Plan Planned::plan(const Problem& problem) const {
  Search search(problem);
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
  climb(problem, facts, search, most);
  // Climbing ends where no single change of the settings helps; from another start it ends
  // elsewhere.
  constexpr int kClimb = 45;
  int more = static_cast<int>(std::min<std::size_t>(2000000 / (problem.graph.nodes.size() + 1), 1000)) - most;
  for (const auto& [room, pending, reserve, bucket] :
       {std::tuple{facts.states, facts.most_grads, facts.largest / 4, Bytes{1}},
        {Bytes{0}, facts.most_grads, facts.largest, Bytes{1}},
        {facts.states / 2, 2 * facts.most_grads, facts.largest / 2, Bytes{1}},
        {facts.states, facts.most_grads / 2, facts.largest / 8, Bytes{8}},
        {facts.states, 4 * facts.most_grads, facts.largest, Bytes{4}},
        {facts.states / 4, facts.most_grads, facts.largest / 8, Bytes{4}}}) {
    if (more < kClimb) {
      break;
    }
    more -= kClimb;
    Search other(problem);
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
  std::size_t left = std::min<std::size_t>(2000, 100000 / (problem.graph.nodes.size() + 1));
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
