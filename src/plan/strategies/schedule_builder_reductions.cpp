// When gradients are reduced, in which buckets, and where their reductions are waited for.
#include <algorithm>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

// The time from which gradients may be held back until the updates begin.
Nanos ScheduleBuilder::deferFrom(Index first_update) const {
  Index begin = first_update;
  while (begin > 0 && graph_.nodes[begin - 1].phase == Phase::Backward &&
         graph_.nodes[begin - 1].micro == graph_.nodes[first_update - 1].micro) {
    --begin;
  }
  const Nanos from = timeline_.reach[begin];
  return from + mulDiv(timeline_.reach[first_update] - from, settings_.defer_after, 1000);
}

// Buckets go out as soon as they are full, or earlier when holding them longer does not fit. Each
// wait sinks to where the reduction is expected to be done, or to where memory is needed, whichever
// comes first.
void ScheduleBuilder::planReductions() {
  if (graph_.stage == 1) {
    schedule_.reductions =
        bucketReductions(problem_, leeway_.exactly(&Settings::reduce_bucket), schedule_.reductions.max_size() / 2);
    return;
  }
  std::vector<Index> seen(graph_.params.size(), 0);  // contributions so far
  std::vector<Index> open_since(graph_.params.size(), kNone);
  Reduction open;
  Bytes bytes = 0;
  Nanos channel = 0;
  std::size_t oldest = 0;  // of the reductions that are not waited for yet
  Bytes pending = 0;       // their bytes
  const auto isFull = [&](Bytes bucket) { return !leeway_.above(&Settings::reduce_bucket, bucket); };
  // Waits at `position` for the oldest reductions: for all, or until no more are pending than may be.
  const auto settle = [&](Index position, bool all) {
    for (; oldest < schedule_.reductions.size(); ++oldest) {
      Reduction& old = schedule_.reductions[oldest];
      if (old.wait > position && !all && leeway_.above(&Settings::pending, pending - 1)) {
        break;
      }
      if (old.wait > position) {
        memory_.add(position, old.wait - 1, -old.reason.a);
        old.wait = position;
        old.wait_reason = {Why::ForMemory};
      }
      pending -= old.reason.a;
    }
  };
  const auto flush = [&](Index launch, Why why) {
    if (open.params.empty()) {
      return;
    }
    open.launch = launch;
    open.wait = slots_;
    open.reason = {why, bytes, 0};
    for (const Index param : open.params) {
      const Index update = usage_.update[param];
      open.wait = update == kNone ? open.wait : std::min(open.wait, std::max(update, launch));
    }
    open.wait_reason = {open.wait == slots_ ? Why::Sunk : Why::BeforeUpdate};
    channel = std::max(channel, timeline_.reach[launch]) + mulDiv(problem_.cost.reduce(bytes), settings_.stretch, 1000);
    const auto done = std::lower_bound(timeline_.reach.begin() + launch, timeline_.reach.end(), channel);
    const auto expected = std::min(static_cast<Index>(done - timeline_.reach.begin()), slots_);
    const bool beside_updates = why == Why::BesideUpdates;
    if (expected < open.wait && !beside_updates) {
      open.wait = expected;
      open.wait_reason = {Why::Sunk};
    }
    const Index full = memory_.firstAbove(launch, open.wait - 1, problem_.budget - bytes);
    if (full < open.wait) {
      open.wait = full;
      open.wait_reason = {Why::ForMemory};
    }
    memory_.add(launch, open.wait - 1, bytes);
    // A backlog of reductions only takes memory that would save gathers: the links cannot run
    // faster.
    if (!beside_updates) {
      settle(launch, false);
    }
    pending += bytes;
    schedule_.reductions.push_back(std::move(open));
    open = {};
    bytes = 0;
  };
  // Parameters are updated in an order of their own, often the reverse of that in which their gradients are
  // made. Those that are updated late can be reduced beside the updates, if memory holds them until then.
  Index first_update = 0;
  while (first_update < slots_ && graph_.nodes[first_update].kind != NodeKind::Optimizer) {
    ++first_update;
  }
  const bool may_defer = first_update < slots_ && leeway_.above(&Settings::defer, 0);
  const Nanos defer_from = may_defer ? deferFrom(first_update) : 0;
  Bytes held_back = 0;
  std::vector<std::pair<Index, Index>> deferred;  // update, parameter
  const auto defers = [&](Index param, Index slot) {
    const Bytes grad = graph_.params[param].grad;
    if (!may_defer || grad == 0 || slot >= first_update || timeline_.reach[slot] < defer_from ||
        usage_.update[param] == kNone || usage_.contributions[param].back() != slot ||
        !leeway_.above(&Settings::defer, held_back + grad - 1) ||
        !fitsBesideReserve(memory_, slot + 1, first_update - 1, grad)) {
      return false;
    }
    held_back += grad;
    memory_.add(slot + 1, first_update - 1, grad);
    deferred.emplace_back(usage_.update[param], param);
    return true;
  };
  Index micro = kNone;
  for (Index slot = 0; slot < slots_; ++slot) {
    const Node& node = graph_.nodes[slot];
    if (slot == first_update && !deferred.empty()) {
      flush(slot, Why::BucketEnd);
      std::sort(deferred.begin(), deferred.end());
      for (const auto& [update, param] : deferred) {
        open.params.push_back(param);
        bytes += graph_.params[param].grad;
        if (isFull(bytes)) {
          flush(slot, Why::BesideUpdates);
        }
      }
      flush(slot, Why::BesideUpdates);
    }
    if (node.micro != micro || node.kind == NodeKind::Optimizer) {
      flush(slot, Why::BucketEnd);
      micro = node.micro;
    }
    if (bytes > 0) {
      if (!memory_.within(slot, slot, problem_.budget - bytes)) {
        flush(slot, Why::ForMemory);
      } else {
        memory_.add(slot, slot, bytes);
      }
    }
    if (choice(overrides_.settle, slot) == Overrides::Yes) {
      settle(slot, true);
    }
    for (const Index param : node.grads) {
      const auto slots = usage_.contributions[param];
      const Index next = ++seen[param];
      const bool more = next < static_cast<Index>(slots.size()) && graph_.nodes[slots[next]].micro == micro;
      // A gradient with several contributions is held from the first on; the slots that add to it
      // count it themselves.
      if (open_since[param] != kNone) {
        memory_.add(open_since[param] + 1, slot - 1, graph_.params[param].grad);
      }
      open_since[param] = more ? slot : kNone;
      if (!more && !defers(param, slot)) {
        open.params.push_back(param);
        bytes += graph_.params[param].grad;
      }
    }
    const Overrides::Choice choose = choice(overrides_.flush, slot);
    if (choose == Overrides::Yes || (choose == Overrides::Free && isFull(bytes))) {
      flush(slot + 1, Why::BucketFull);
    }
  }
  flush(slots_, Why::BucketEnd);
}

}  // namespace dc::plan
