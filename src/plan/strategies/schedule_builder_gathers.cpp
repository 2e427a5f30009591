// In which buckets parameters are gathered, and when.
#include <algorithm>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

struct ScheduleBuilder::Bucket {
  std::size_t begin;  // residencies, in order of first use
  std::size_t end;
  Bytes bytes;
  Nanos duration;
  Index first;     // the slot that needs it first
  Index earliest;  // the first position at which none of its parameters is gathered from before
  Bytes held;      // from its launch on: its parameters, and the shards that visit the device for it
};

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
