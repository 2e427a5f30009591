// What stays gathered, in which buckets the rest is gathered, and when.
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

struct ScheduleBuilder::Bucket {
  std::size_t begin;  // residencies, in order of first use
  std::size_t end;
  Bytes bytes;
  Nanos duration;
  Index first;     // the slot that needs it first
  Index earliest;  // the first position at which none of its parameters is gathered from before
  Bytes held;      // from its launch on: its parameters, and the shards that visit the device for it
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

// In the order of their first slots.
void ScheduleBuilder::makeResidencies() {
  std::vector<char> for_good(graph_.params.size(), 0);
  for (std::size_t p = 0; p < graph_.params.size(); ++p) {
    if (staysForGood(static_cast<Index>(p))) {
      memory_.add(0, usage_.uses[p].front() - 1, graph_.params[p].bytes);
      memory_.add(usage_.uses[p].back() + 1, slots_ - 1, graph_.params[p].bytes);
      schedule_.start_gathered.push_back(static_cast<Index>(p));
      for_good[p] = 1;
    }
  }
  std::vector<Index> next(first_gap_.begin(), first_gap_.end() - 1);  // parameter -> its next use
  std::vector<Index> open(graph_.params.size(), kNone);               // parameter -> its last residency
  schedule_.residencies.reserve(kept_.size());
  for (Index slot = 0; slot < slots_; ++slot) {
    for (const Index param : usage_.needs[slot]) {
      const Index use = next[param]++;
      if (for_good[param] != 0) {
        continue;
      }
      const Bytes bytes = graph_.params[param].bytes;
      if (open[param] != kNone) {
        Residency& before = schedule_.residencies[open[param]];
        if (kept_[use] != 0) {
          before.last = slot;
          continue;
        }
        before.release_reason = {Why::NotKept, bytes, slot - usage_.uses[param][use - first_gap_[param] - 1]};
      }
      open[param] = static_cast<Index>(schedule_.residencies.size());
      schedule_.residencies.push_back({param, slot, slot, slot, kNone, {}, {Why::LastUse, bytes, 0}});
    }
  }
}

// Neighbours in order of use share a collective until it saturates the link, where the later ones
// fit that early.
std::vector<ScheduleBuilder::Bucket> ScheduleBuilder::bucketGathers() {
  std::vector<Bucket> buckets;
  std::vector<Residency>& all = schedule_.residencies;
  std::vector<Index> earliest(all.size(), 0);
  std::vector<Index> use_of(overrides_.join.empty() ? 0 : all.size(), 0);
  std::vector<Index> free_from(graph_.params.size(), 0);
  for (std::size_t i = 0; i < all.size(); ++i) {
    earliest[i] = free_from[all[i].param];
    free_from[all[i].param] = all[i].last + 1;
  }
  for (std::size_t i = 0; i < use_of.size(); ++i) {
    const auto uses = usage_.uses[all[i].param];
    const auto at = std::lower_bound(uses.begin(), uses.end(), all[i].first);
    use_of[i] = first_gap_[all[i].param] + static_cast<Index>(at - uses.begin());
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Bytes bytes = graph_.params[all[i].param].bytes;
    const bool visits = !schedule_.shard_on_host.empty() && schedule_.shard_on_host[all[i].param] != 0;
    const Bytes held = bytes + (visits ? graph_.params[all[i].param].shard : 0);
    if (!buckets.empty()) {
      Bucket& open = buckets.back();
      const bool same_slot = all[i].first == open.first;
      const auto isSmall = [&](Bytes size) { return leeway_.above(&Settings::gather_bucket, size); };
      // Joining must not hold the later one much longer than its own gather takes.
      const auto isNear = [&] {
        return timeline_.reach[all[i].first] - timeline_.reach[open.first] <= 4 * problem_.cost.gather(bytes);
      };
      const auto wanted = [&] { return isSmall(open.bytes) ? same_slot || isNear() : same_slot && isSmall(bytes); };
      const Overrides::Choice choose = use_of.empty() ? Overrides::Free : overrides_.join[use_of[i]];
      if ((choose == Overrides::Yes || (choose == Overrides::Free && wanted())) && earliest[i] <= open.first &&
          (same_slot || memory_.within(open.first, all[i].first - 1, problem_.budget - held))) {
        memory_.add(open.first, all[i].first - 1, held);
        open.held += held;
        open.earliest = std::max(open.earliest, earliest[i]);
        open.end = i + 1;
        open.bytes += bytes;
        continue;
      }
    }
    buckets.push_back({i, i + 1, bytes, 0, all[i].first, earliest[i], held});
  }
  for (Bucket& bucket : buckets) {
    bucket.duration = problem_.cost.gather(bucket.bytes);
  }
  return buckets;
}

// From the last bucket to the first: each must be done when its slot is reached and when the
// channel is wanted by the next one. That gives the latest start that is still hidden. Memory may
// force a later one.
void ScheduleBuilder::prefetch() {
  std::vector<Bucket> buckets = bucketGathers();
  std::vector<Index> launch(buckets.size());
  std::vector<Nanos> start(buckets.size());
  Nanos wanted = timeline_.reach.back();
  for (std::size_t b = buckets.size(); b-- > 0;) {
    const Nanos by = std::min(wanted, timeline_.reach[buckets[b].first]);
    start[b] = by - mulDiv(buckets[b].duration, settings_.stretch, 1000);
    launch[b] = positionAt(start[b], buckets[b].first);
    wanted = start[b];
  }
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const Bucket& bucket = buckets[b];
    const Index hidden = std::max(launch[b], bucket.earliest);
    const Index full = memory_.lastAbove(hidden, bucket.first - 1, problem_.budget - bucket.held);
    const Index at = std::max(hidden, full + 1);
    memory_.add(at, bucket.first - 1, bucket.held);
    const Nanos under = timeline_.reach[bucket.first] - timeline_.reach[at];
    Reason reason{Why::Hidden, bucket.duration, under};
    if (at > hidden && under < bucket.duration) {
      reason = {Why::MemoryBound, bucket.bytes, under};
    } else if (under < bucket.duration) {
      reason = {Why::Exposed, bucket.duration, under};
    }
    for (std::size_t i = bucket.begin; i < bucket.end; ++i) {
      Residency& residency = schedule_.residencies[i];
      residency.launch = at;
      residency.group = static_cast<Index>(b);
      residency.reason = reason;
    }
  }
}

}  // namespace dc::plan
