// What stays gathered between two uses.
#include <algorithm>
#include <queue>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

// Between two uses of a parameter. Slots begin..end (inclusive, possibly none) lie between them.
struct ScheduleBuilder::Gap {
  Index param;
  Index use;  // the use that is saved a gather, among all uses
  Index begin;
  Index end;
  bool first = false;  // a build must keep it
  Nanos value = 0;     // nanoseconds saved per MiB, weighted
  Nanos lifetime = 0;
};

// Inside a block a parameter is soon used again (computed again, then in backward): this comes
// before all else that takes memory, since a gather for so short a time would be in the way of
// every other.
void ScheduleBuilder::keepInBlocks() {
  kept_.assign(static_cast<std::size_t>(first_gap_.back()), 0);
  for (std::size_t p = 0; p < graph_.params.size(); ++p) {
    const auto uses = usage_.uses[p];
    const Bytes bytes = graph_.params[p].bytes;
    for (std::size_t i = 1; i < uses.size() && !graph_.params[p].persistent; ++i) {
      const Node& before = graph_.nodes[uses[i - 1]];
      const Node& after = graph_.nodes[uses[i]];
      const Index use = first_gap_[p] + static_cast<Index>(i);
      const Index update = usage_.update[p];
      if (update != kNone && uses[i - 1] < update && update < uses[i]) {
        continue;  // stale after the update
      }
      if (before.block == after.block && before.phase == after.phase && before.micro == after.micro &&
          uses[i] > uses[i - 1] + 1 && choice(overrides_.keep, use) != Overrides::No &&
          memory_.within(uses[i - 1] + 1, uses[i] - 1, problem_.budget - bytes)) {
        memory_.add(uses[i - 1] + 1, uses[i] - 1, bytes);
        kept_[use] = 1;
      }
    }
  }
}

// The gaps that are open to choice.
std::vector<ScheduleBuilder::Gap> ScheduleBuilder::gapsToKeep() {
  std::vector<Gap> gaps;
  for (std::size_t p = 0; p < graph_.params.size(); ++p) {
    const Param& param = graph_.params[p];
    const auto uses = usage_.uses[p];
    for (std::size_t i = 1; i < uses.size(); ++i) {
      const Index use = first_gap_[p] + static_cast<Index>(i);
      const Index update = usage_.update[p];
      if (update != kNone && uses[i - 1] < update && update < uses[i]) {
        continue;  // stale after the update
      }
      if (kept_[use] != 0) {
        continue;
      }
      if (param.persistent || uses[i] == uses[i - 1] + 1) {
        kept_[use] = 1;  // memory for it is counted already, or none is needed
        continue;
      }
      const Overrides::Choice choose = choice(overrides_.keep, use);
      if (choose != Overrides::No) {
        gaps.push_back({static_cast<Index>(p), use, uses[i - 1] + 1, uses[i] - 1, choose == Overrides::Yes});
      }
    }
  }
  return gaps;
}

// Walks through the step and keeps everything; where memory is full, what is used again last leaves.
// When every gather delays the step alike, no rule saves more of them (for parameters of one size).
void ScheduleBuilder::keepUntilFull(std::span<const Gap> gaps) {
  std::vector<std::pair<Index, Index>> pairs;
  pairs.reserve(gaps.size());
  for (std::size_t g = 0; g < gaps.size(); ++g) {
    pairs.emplace_back(gaps[g].begin, static_cast<Index>(g));
  }
  const Lists begins(static_cast<std::size_t>(slots_), pairs);
  std::vector<Bytes> ends(static_cast<std::size_t>(slots_) + 1, 0);  // bytes whose gap ends before this slot
  std::vector<char> dropped(gaps.size(), 0);
  std::priority_queue<std::pair<Index, Index>> held;  // (last slot, gap)
  Bytes bytes = 0;
  for (Index slot = 0; slot < slots_; ++slot) {
    bytes -= ends[slot];
    for (const Index g : begins[slot]) {
      const Bytes size = graph_.params[gaps[g].param].bytes;
      bytes += size;
      ends[gaps[g].end + 1] += size;
      held.emplace(gaps[g].end, g);
    }
    const Bytes room = bytes == 0 ? 0 : problem_.budget - memory_.max(slot, slot);
    while (bytes > 0 && leeway_.above(&Settings::reserve, room - bytes)) {
      const auto [end, g] = held.top();
      held.pop();
      const Bytes size = graph_.params[gaps[g].param].bytes;
      bytes -= size;
      ends[end + 1] -= size;
      dropped[g] = 1;
    }
  }
  for (std::size_t g = 0; g < gaps.size(); ++g) {
    if (dropped[g] == 0) {
      memory_.add(gaps[g].begin, gaps[g].end, graph_.params[gaps[g].param].bytes);
      kept_[gaps[g].use] = 1;
    }
  }
}

// Which uses need no gather of their own because the parameter has stayed from the use before. The
// most valuable first: exposed time saved per byte and time that the byte is held. What does not
// fit is skipped, what comes after it still tried.
void ScheduleBuilder::keepGathered() {
  std::vector<Gap> gaps = gapsToKeep();
  if (keepAll(gaps)) {
    return;
  }
  for (Gap& gap : gaps) {
    const Bytes bytes = graph_.params[gap.param].bytes;
    const std::int64_t weight = timeline_.weight.empty() ? 1000 : timeline_.weight[gap.use];
    gap.value = mulDiv(problem_.cost.gather(bytes), weight << 20, std::max<Bytes>(bytes, 1));
    gap.lifetime = gap.first ? 0 : timeline_.reach[gap.end + 1] - timeline_.reach[gap.begin] + 1;
  }
  if (leeway_.farthest()) {
    const auto free = std::stable_partition(gaps.begin(), gaps.end(), [](const Gap& gap) { return gap.first; });
    keepIfFits({gaps.begin(), free});
    keepUntilFull({free, gaps.end()});
  }
  std::stable_sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) {
    return static_cast<Wide>(a.value) * b.lifetime > static_cast<Wide>(b.value) * a.lifetime;
  });
  keepIfFits(gaps);
}

// Where all gaps fit together, no order is needed.
bool ScheduleBuilder::keepAll(std::span<const Gap> gaps) {
  MemoryTree all = memory_;
  for (const Gap& gap : gaps) {
    all.add(gap.begin, gap.end, graph_.params[gap.param].bytes);
  }
  if (!fitsBesideReserve(all, 0, slots_ - 1, 0)) {
    return false;
  }
  for (const Gap& gap : gaps) {
    kept_[gap.use] = 1;
  }
  memory_ = std::move(all);
  return true;
}

void ScheduleBuilder::keepIfFits(std::span<const Gap> gaps) {
  for (const Gap& gap : gaps) {
    if (kept_[gap.use] != 0) {
      continue;
    }
    const Bytes bytes = graph_.params[gap.param].bytes;
    if (gap.first ? memory_.within(gap.begin, gap.end, problem_.budget - bytes)
                  : fitsBesideReserve(memory_, gap.begin, gap.end, bytes)) {
      memory_.add(gap.begin, gap.end, bytes);
      kept_[gap.use] = 1;
    }
  }
}

// A frozen parameter that stays for the whole step can stay for good.
bool ScheduleBuilder::staysForGood(Index param) {
  const auto uses = usage_.uses[param];
  if (!graph_.params[param].frozen || uses.empty()) {
    return false;
  }
  for (Index use = first_gap_[param] + 1; use < first_gap_[param + 1]; ++use) {
    if (kept_[use] == 0) {
      return false;
    }
  }
  const Bytes bytes = graph_.params[param].bytes;
  return fitsBesideReserve(memory_, 0, uses.front() - 1, bytes) &&
         fitsBesideReserve(memory_, uses.back() + 1, slots_ - 1, bytes);
}

}  // namespace dc::plan
