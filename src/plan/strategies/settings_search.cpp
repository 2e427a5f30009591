#include "deepcompile/plan/strategies/settings_search.h"

#include <algorithm>
#include <array>

namespace dc::plan {

Facts::Facts(const Problem& problem) : most_grads(problem.cost.saturatingReduce()) {
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
    grads += param.grad;
  }
}

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
    if (search.best()->settings.make_room > 0) {
      vary([&](Settings& s) { s.lead = s.lead * 5 / 4; }) || vary([&](Settings& s) { s.lead = s.lead * 4 / 5; });
    }
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
    vary([&](Settings& s) { s.defer = s.defer == 0 ? facts.grads / 4 : s.defer * 2; }) ||
        vary([&](Settings& s) { s.defer = s.defer == 0 ? facts.grads / 16 : s.defer / 2; });
    if (search.best()->settings.defer > 0) {
      vary([&](Settings& s) { s.defer_after = s.defer_after * 2 / 3; }) ||
          vary([&](Settings& s) { s.defer_after = 1000 - (1000 - s.defer_after) * 2 / 3; });
    }
    // Once more with the times as they turned out: what is exposed is known now.
    if (search.attempts() < most) {
      search.attempt(search.best()->settings, Timeline(search.best()->timeline));
    }
  }
}

void wander(const Problem& problem, const Facts& facts, Search& search, int attempts) {
  std::uint64_t random = 88172645463325252ull;
  const auto below = [&](std::uint64_t bound) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<std::size_t>(random % bound);
  };
  // Thousandths.
  constexpr std::array<std::int64_t, 8> kFactors = {250, 500, 700, 850, 1200, 1500, 2000, 4000};
  const auto scaled = [&](std::int64_t value, std::int64_t most) {
    return std::clamp<std::int64_t>(mulDiv(value, kFactors[below(kFactors.size())], 1000), 1, std::max(most, Bytes{1}));
  };
  const auto change = [&](Settings& s) {
    const Bytes crossing =
        mulDiv(search.best()->step, problem.cost.machine().to_host.bandwidth, 1000000000 * (4 * facts.micros));
    switch (below(11)) {
      case 0:
        s.reserve = scaled(std::max(s.reserve, facts.largest / 8), 8 * facts.largest);
        break;
      case 1:
        s.gather_bucket = scaled(s.gather_bucket, kLargest);
        break;
      case 2:
        s.reduce_bucket = scaled(s.reduce_bucket, kLargest);
        break;
      case 3:
        s.stretch = static_cast<int>(scaled(s.stretch, 64000));
        break;
      case 4:
        s.pending = scaled(std::max(s.pending, facts.most_grads / 4), kLargest);
        break;
      case 5:
        s.make_room =
            s.make_room > 0 && below(8) == 0 ? 0 : scaled(std::max(s.make_room, facts.states / 8), facts.states);
        break;
      case 6:
        s.make_room_each =
            s.make_room_each > 0 && below(8) == 0 ? 0 : scaled(std::max(s.make_room_each, crossing / 4), 4 * crossing);
        break;
      case 7:
        s.defer = s.defer > 0 && below(8) == 0 ? 0 : scaled(std::max(s.defer, facts.grads / 16), facts.grads);
        break;
      case 8:
        s.defer_after = static_cast<int>(below(1000));
        break;
      case 9:
        s.lead = static_cast<int>(std::clamp<std::int64_t>(scaled(s.lead, 8000), 500, 8000));
        break;
      default:
        s.farthest = !s.farthest;
    }
  };
  for (int i = 0; i < attempts; ++i) {
    Settings other = search.best()->settings;
    for (std::size_t changes = 1 + below(3); changes > 0; --changes) {
      change(other);
    }
    const Timeline timeline = below(3) == 0   ? search.undisturbed()
                              : below(2) == 0 ? search.best()->input
                                              : search.best()->timeline;
    search.attempt(other, timeline);
  }
}

}  // namespace dc::plan
