#include "deepcompile/plan/window_bound.h"

#include <algorithm>
#include <limits>

namespace dc::plan {
namespace {

Bytes crossing(Nanos time, const Link& link) {
  return static_cast<Bytes>(
      std::min<Wide>(kLargest, static_cast<Wide>(std::max<Nanos>(0, time)) * link.bandwidth / 1000000000));
}

// Refutes steps of a given length. Offloading makes room, but what is away when a window begins has left
// before it, or began the step on the host and leaves after its update; and it comes back after: states
// and shards once, activations once for every micro-batch.
class Refuter {
 public:
  Refuter(const StepGraph& graph, const CostModel& cost, const Cut& cut)
      : graph_(graph), cost_(cost), windows_(cut.windows), spans_(cut.spans), machine_(cost.machine()) {
    for (const Param& param : graph.params) {
      movable_ += param.state + param.shard;
      all_grads_ += param.grad;
      frozen_ += param.frozen ? param.bytes : 0;
    }
    update_ = windows_.size();
    for (std::size_t w = windows_.size(); w-- > 0;) {
      update_ = windows_[w].update ? w : update_;
    }
    least_begin_.assign(windows_.size() + 1, 0);
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      least_begin_[w + 1] = least_begin_[w] + leastOf(w);
    }
    // Whether to wait, so that more leaves, can never pay: the room that it makes saves less time than that.
    const Nanos second = 1000000000;
    waiting_never_pays_ = cost.leastGather(crossing(second, machine_.to_host)) <= second;
  }

  // A lower bound for steps that take at most `step`. Each round knows better than the one before when
  // windows begin at the earliest.
  WindowBound over(Nanos step, Nanos reductions) {
    step_ = step;
    begin_ = least_begin_;
    constexpr int kRounds = 3;
    WindowBound bound;
    for (int round = 0; round < kRounds; ++round) {
      bound = follow(reductions);
      if (bound.step > step) {
        break;
      }
    }
    return bound;
  }

 private:
  // The least time of a window when everything movable is away: for when windows begin at the earliest,
  // and how much of the step is left after they begin at the most.
  Nanos leastOf(std::size_t w) const {
    const Window& window = windows_[w];
    const auto room = [&](Bytes bytes, std::size_t at) {
      return std::max<Bytes>(0, bytes + movable_ + windows_[at].activations);
    };
    const Bytes held = w == 0 ? frozen_ : std::min(room(window.room, w), room(window.first_room, w));
    const Nanos gathers = cost_.leastGather(std::max<Bytes>(0, window.needed - held));
    const Bytes left = w + 1 == windows_.size() ? 0 : room(windows_[w + 1].room, w + 1) + windows_[w + 1].fresh;
    const Bytes carried = graph_.stage == 1 ? window.reduced : left;
    const Nanos reductions = cost_.leastReduce(std::max<Bytes>(0, window.reduced - carried));
    const Nanos links = machine_.shared_links ? gathers + reductions : std::max(gathers, reductions);
    return std::max(links, window.compute);
  }

  Bytes awayBy(std::size_t w, Nanos latest) const {
    const Bytes left = crossing(latest, machine_.to_host) + crossing(step_ - begin_[update_], machine_.to_host);
    return std::min({movable_, crossing(step_ - begin_[w], machine_.to_device), left});
  }

  // However late the window begins.
  Bytes mostAway(std::size_t w) const { return awayBy(w, step_ - (least_begin_.back() - least_begin_[w])); }

  Bytes mostBacklog(std::size_t w) const {
    if (w == 0 || w == windows_.size()) {
      return 0;
    }
    const Bytes room = std::max<Bytes>(0, windows_[w].room + mostAway(w));
    return graph_.stage == 1 ? all_grads_ : std::min(all_grads_, room + windows_[w].fresh);
  }

  // Bandwidth alone: a reduction may run across a boundary, so its latency belongs to no window.
  Nanos reduceTime(Bytes bytes) const {
    return bytes <= 0 ? 0 : std::max<Nanos>(0, cost_.leastReduce(bytes) - cost_.leastReduce(1));
  }
  Nanos gatherTime(Bytes bytes) const {
    return bytes <= 0 ? 0 : std::max<Nanos>(0, cost_.leastGather(bytes) - cost_.leastGather(1));
  }

  // What window w finds gathered at most.
  Bytes heldAt(std::size_t w, Bytes away, Bytes backlog) const {
    const Window& window = windows_[w];
    const Bytes taken = graph_.stage == 1 ? 0 : std::max<Bytes>(0, backlog - window.fresh);
    const Bytes room = std::max<Bytes>(0, window.room + away) - taken;
    return w == 0 ? frozen_ : std::max<Bytes>(0, std::min(room, window.first_room + away));
  }

  // For each backlog when window w begins: the least time of its gathers. The latency counts where some
  // gather is needed in any case: with no jump where the last gather is saved, a window that begins later
  // never ends earlier.
  std::vector<Nanos> gathersOf(std::size_t w, const std::vector<Nanos>& arrival, Bytes unit) const {
    std::vector<Nanos> gathers(arrival.size());
    const Bytes in_any_case = windows_[w].needed - heldAt(w, mostAway(w), 0);
    const Nanos latency = in_any_case > 0 ? cost_.leastGather(1) : 0;
    for (std::size_t from = 0; from < arrival.size(); ++from) {
      const Bytes away = waiting_never_pays_ ? std::min(mostAway(w), awayBy(w, arrival[from])) : mostAway(w);
      gathers[from] = latency + gatherTime(windows_[w].needed - heldAt(w, away, static_cast<Bytes>(from) * unit));
    }
    return gathers;
  }

  // What is not reduced when a window begins takes room from what it finds gathered, and must be reduced
  // later. The bound follows that backlog from boundary to boundary in steps of `unit` bytes: whatever it
  // is, it lies between two of them. Every boundary gives away one unit, so units are large only where
  // there are so many windows that the time to compute this counts.
  WindowBound follow(Nanos reductions) {
    Bytes most = 1;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      most = std::max(most, mostBacklog(w));
    }
    const Bytes units = std::clamp<Bytes>(8192 / static_cast<Bytes>(windows_.size() + 1), 16, 64);
    const Bytes unit = (most + units - 1) / units;
    const std::int64_t slowdown = machine_.slowdown;
    const Nanos unreached = std::numeric_limits<Nanos>::max() / 2;
    WindowBound bound;
    Nanos compute = 0;
    Bytes away = 0;                    // activations that could be away when a window begins
    std::vector<Nanos> arrival = {0};  // by backlog: when the window begins at the earliest
    std::vector<Nanos> earliest = {0};
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      const Window& window = windows_[w];
      const std::vector<Nanos> gathers = gathersOf(w, arrival, unit);
      const Bytes cap = mostBacklog(w + 1);
      std::vector<Nanos> next(static_cast<std::size_t>(cap / unit) + 1, unreached);
      // What must be reduced depends on the difference of the two backlogs alone, but for the last step.
      std::vector<Nanos> reduced(arrival.size() + next.size());
      for (std::size_t d = 0; d < reduced.size(); ++d) {
        reduced[d] = reduceTime(window.reduced + (static_cast<Bytes>(d) - static_cast<Bytes>(next.size())) * unit);
      }
      for (std::size_t to = 0; to < next.size(); ++to) {
        const bool last = to + 1 == next.size();
        for (std::size_t from = 0; from < arrival.size(); ++from) {
          const Nanos reduce = last ? reduceTime(static_cast<Bytes>(from) * unit + window.reduced - cap)
                                    : reduced[from + next.size() - to - 1];
          const Nanos links = machine_.shared_links ? gathers[from] + reduce : std::max(gathers[from], reduce);
          const Nanos time = std::max({links, window.compute + links / (1000 + slowdown) * slowdown,
                                       gathers[from] + window.after_last, window.update_rest});
          next[to] = std::min(next[to], std::min(unreached, arrival[from] + time));
        }
      }
      arrival = std::move(next);
      earliest.push_back(*std::min_element(arrival.begin(), arrival.end()));
      bound.gathers += cost_.leastGather(std::max<Bytes>(0, window.needed - heldAt(w, mostAway(w), 0)));
      compute += window.compute;
      away += std::min(window.activations, crossing(step_ - begin_[w], machine_.to_device));
    }
    // Each byte of activations that is away makes room for one byte more, gathered or not reduced, at each
    // beginning of a window that it lives across.
    const Wide trips = static_cast<Wide>(crossing(step_, machine_.to_device)) * spans_;
    const Bytes saved = std::min(away, static_cast<Bytes>(std::min<Wide>(kLargest, trips)));
    const Nanos credit = std::max(cost_.leastGather(saved), cost_.leastReduce(saved));
    for (std::size_t w = 0; w < earliest.size(); ++w) {
      begin_[w] = std::max(begin_[w], earliest[w] - credit);
    }
    bound.gathers = std::max<Nanos>(0, bound.gathers - cost_.leastGather(saved));
    const Nanos links = machine_.shared_links ? bound.gathers + reductions : std::max(bound.gathers, reductions);
    bound.step = std::max({earliest.back() - credit, links, compute + links / (1000 + slowdown) * slowdown});
    return bound;
  }

  const StepGraph& graph_;
  const CostModel& cost_;
  const std::vector<Window>& windows_;
  const Index spans_;
  const Machine& machine_;
  Bytes movable_ = 0;
  Bytes all_grads_ = 0;
  Bytes frozen_ = 0;
  std::size_t update_ = 0;          // the first window that updates
  std::vector<Nanos> least_begin_;  // when windows begin at the earliest, whatever the step takes
  bool waiting_never_pays_ = false;
  Nanos step_ = 0;
  std::vector<Nanos> begin_;  // in a step of step_
};

}  // namespace

WindowBound windowBound(const StepGraph& graph, const CostModel& cost, const Cut& cut, Nanos reductions, Nanos known) {
  Refuter refuter(graph, cost, cut);
  // The longer a step may take, the more can be moved to make room, the less must be gathered. The last
  // digits of the bound are not worth their time.
  Nanos low = known;
  Nanos high = std::max(refuter.over(known, reductions).step, known);
  while (high - low > low / 8192) {
    const Nanos middle = low + (high - low) / 2;
    if (refuter.over(middle, reductions).step <= middle) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return {low, refuter.over(low, reductions).gathers};
}

}  // namespace dc::plan
