// What leaves the device when the step does not fit, or so that more can stay gathered.
#include <algorithm>

#include "deepcompile/plan/strategies/schedule_builder.h"

namespace dc::plan {

// In order of what it costs: states cross the link twice in a step, activations twice in a
// micro-batch, shards once for every gather.
void ScheduleBuilder::planOffload() {
  const Offload may_leave = problem_.cost.machine().offload;
  if (may_leave == Offload::Nothing) {
    return;
  }
  const auto over = [&] { return !memory_.within(0, slots_ - 1, problem_.budget); };
  if (leeway_.above(&Settings::make_room, 0)) {
    offloadStates(false);
  }
  if (over()) {
    offloadStates(true);
  }
  if (may_leave == Offload::States) {
    return;
  }
  if (over() || leeway_.above(&Settings::make_room_each, 0)) {
    offloadBuffers(over());
  }
  if (over()) {
    offloadShards();
  }
}

// States that are updated first leave first. A state begins the step on the device and leaves
// during the first forward pass when memory allows; else it begins and ends on the host.
void ScheduleBuilder::offloadStates(bool forced) {
  std::vector<char> moved(graph_.params.size(), 0);
  Nanos leaving = 0;
  for (const Move& move : schedule_.moves) {
    moved[move.item.id] = 1;
    leaving += problem_.cost.toHost(deviceBytes(graph_, move.item));
  }
  const std::size_t before = schedule_.moves.size();
  Bytes bytes = 0;
  bool enough = false;
  for (Index slot = 0; slot < slots_ && !enough; ++slot) {
    for (const Index param : graph_.nodes[slot].updates) {
      const Bytes state = graph_.params[param].state;
      if (state == 0 || moved[param] != 0) {
        continue;
      }
      if (forced && memory_.within(0, slots_ - 1, problem_.budget)) {
        enough = true;
        break;
      }
      bytes += state;
      leaving += problem_.cost.toHost(state);
      const auto gone = std::lower_bound(timeline_.reach.begin(), timeline_.reach.end(), leaving);
      const auto offloaded = static_cast<Index>(gone - timeline_.reach.begin());
      Move move;
      move.item = {ItemKind::State, param};
      move.need = slot;
      move.reload = slot;
      const bool over = !memory_.within(0, slots_ - 1, problem_.budget);
      move.reason = {over ? Why::OverBudget : Why::MakesRoom, state, 0};
      // It is there before it has left and after its update.
      const bool fits_around =
          memory_.within(0, offloaded - 1, problem_.budget) && memory_.within(slot, slots_ - 1, problem_.budget);
      if (offloaded < slot && fits_around) {
        move.offload = 0;
        move.offloaded = offloaded;
        memory_.add(offloaded, slot - 1, -state);
      } else {
        move.offload = slot + 1;
        move.offloaded = std::min(slot + 2, slots_);
        memory_.add(0, slot - 1, -state);
        memory_.add(move.offloaded, slots_ - 1, -state);
      }
      schedule_.moves.push_back(move);
      enough = !forced && !leeway_.above(&Settings::make_room, bytes);
      if (enough) {
        break;
      }
    }
  }
  // The way back: as late as is still hidden, the last one first, where memory allows.
  Nanos channel = timeline_.reach.back();
  for (std::size_t m = schedule_.moves.size(); m-- > before;) {
    Move& move = schedule_.moves[m];
    const Bytes state = deviceBytes(graph_, move.item);
    channel =
        std::min(channel, timeline_.reach[move.need]) - mulDiv(problem_.cost.toDevice(state), settings_.lead, 1000);
    const Index wanted_at = std::max(positionAt(channel, move.need), move.offload == 0 ? move.offloaded : 0);
    const Index full =
        memory_.lastAbove(wanted_at, move.need - 1, problem_.budget - leeway_.exactly(&Settings::reserve) - state);
    const Index at = std::max(wanted_at, full + 1);
    memory_.add(at, move.need - 1, state);
    move.reload = at;
  }
  // Copies back to the host may take their time while memory allows.
  for (std::size_t m = before; m < schedule_.moves.size(); ++m) {
    Move& move = schedule_.moves[m];
    if (move.offload == 0) {
      continue;
    }
    const Bytes state = deviceBytes(graph_, move.item);
    const Index full = memory_.firstAbove(move.offloaded, slots_ - 1, problem_.budget - state);
    memory_.add(move.offloaded, full - 1, state);
    move.offloaded = std::max(move.offloaded, std::min(full, slots_));
  }
}

// Activations that are made early and read late: those over slots that do not fit, and as many bytes of each
// micro-batch as the settings say.
void ScheduleBuilder::offloadBuffers(bool forced) {
  // States have the links to themselves: those that leave at the start are ahead of every buffer, and a
  // buffer that returns while they do would wait for them.
  Nanos leaving = 0;
  Nanos returning = timeline_.reach.back();
  for (const Move& move : schedule_.moves) {
    leaving += move.offload == 0 ? problem_.cost.toHost(deviceBytes(graph_, move.item)) : 0;
    returning = std::min(returning, timeline_.reach[move.reload]);
  }
  Index micro = kNone;
  Bytes moved = 0;
  std::vector<std::size_t> mine;
  std::vector<Index> order;
  for (std::size_t b = 0; b < graph_.buffers.size(); ++b) {
    if (usage_.buffer_made[b] != kNone && graph_.buffers[b].bytes > 0 && !graph_.buffers[b].gradient) {
      order.push_back(static_cast<Index>(b));
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](Index a, Index b) { return usage_.buffer_made[a] < usage_.buffer_made[b]; });
  for (const Index buffer : order) {
    const Bytes bytes = graph_.buffers[buffer].bytes;
    Index from = usage_.buffer_made[buffer];
    Index longest_from = kNone;
    Index longest_to = kNone;
    for (const Index read : usage_.buffer_reads[buffer]) {
      if (longest_from == kNone || read - from > longest_to - longest_from) {
        longest_from = from;
        longest_to = read;
      }
      from = read;
    }
    if (longest_from == kNone || longest_to - longest_from < 3) {
      continue;
    }
    const Index inner_from = longest_from + 2;
    const Index inner_to = longest_to - 1;
    const Index over = forced ? memory_.firstAbove(inner_from, inner_to, problem_.budget) : inner_to + 1;
    const Nanos left = std::max(leaving, timeline_.reach[longest_from + 1]) + problem_.cost.toHost(bytes);
    if (over > inner_to) {
      // Worth it only while the copies keep up: gone before half of the time away is over.
      const Index m = graph_.nodes[usage_.buffer_made[buffer]].micro;
      moved = m == micro ? moved : 0;
      micro = m;
      const Nanos half =
          timeline_.reach[longest_from + 1] + (timeline_.reach[longest_to] - timeline_.reach[longest_from + 1]) / 2;
      if (left > half || timeline_.reach[longest_to] > returning || !leeway_.above(&Settings::make_room_each, moved)) {
        continue;
      }
      moved += bytes;
    }
    leaving = left;
    const auto gone = std::lower_bound(timeline_.reach.begin(), timeline_.reach.end(), leaving);
    Move move;
    move.item = {ItemKind::Buffer, buffer};
    move.offload = longest_from + 1;
    move.offloaded =
        std::clamp(static_cast<Index>(gone - timeline_.reach.begin()), inner_from, std::min(over, inner_to));
    move.reload = longest_to;
    move.need = longest_to;
    move.reason = {over > inner_to ? Why::MakesRoom : Why::OverBudget, bytes, 0};
    memory_.add(move.offloaded, longest_to - 1, -bytes);
    mine.push_back(schedule_.moves.size());
    schedule_.moves.push_back(move);
  }
  // Back in the order of need, as late as is still hidden, where memory allows.
  std::stable_sort(mine.begin(), mine.end(),
                   [&](std::size_t a, std::size_t b) { return schedule_.moves[a].need > schedule_.moves[b].need; });
  Nanos channel = timeline_.reach.back();
  for (const std::size_t m : mine) {
    Move& move = schedule_.moves[m];
    const Bytes bytes = deviceBytes(graph_, move.item);
    channel = std::min(channel, timeline_.reach[move.need]) - problem_.cost.toDevice(bytes);
    const Index wanted_at = std::max(positionAt(channel, move.need), move.offloaded);
    const Index full = memory_.lastAbove(wanted_at, move.need - 1, problem_.budget - bytes);
    move.reload = std::max(wanted_at, full + 1);
    memory_.add(move.reload, move.need - 1, bytes);
  }
}

// The last resort: shards live on the host and visit the device for each gather and for their
// update. Their states must be on the host too, and travel with them.
void ScheduleBuilder::offloadShards() {
  if (graph_.stage < 3) {
    return;
  }
  schedule_.shard_on_host.assign(graph_.params.size(), 0);
  std::vector<Index> move_of(graph_.params.size(), kNone);
  for (std::size_t m = 0; m < schedule_.moves.size(); ++m) {
    if (schedule_.moves[m].item.kind == ItemKind::State) {
      move_of[schedule_.moves[m].item.id] = static_cast<Index>(m);
    }
  }
  for (std::size_t p = 0; p < graph_.params.size() && !memory_.within(0, slots_ - 1, problem_.budget); ++p) {
    const Bytes shard = graph_.params[p].shard;
    if (move_of[p] == kNone || schedule_.moves[move_of[p]].offload == 0 || shard == 0 || graph_.params[p].persistent) {
      continue;
    }
    Move& move = schedule_.moves[move_of[p]];
    const Index last_use = usage_.uses[p].empty() ? kNone : usage_.uses[p].back();
    if (move.need <= last_use) {
      continue;
    }
    if (move.reload <= last_use) {
      // Shard and states come back together, after the shard's last visit for a gather.
      memory_.add(move.reload, last_use, -deviceBytes(graph_, move.item));
      move.reload = last_use + 1;
    }
    schedule_.shard_on_host[p] = 1;
    memory_.add(0, slots_ - 1, -shard);
    memory_.add(move.reload, move.offloaded - 1, shard);
    for (const Index slot : usage_.uses[p]) {
      memory_.add(slot, slot, shard);  // at most: a prefetched gather holds it from its launch
    }
  }
}

}  // namespace dc::plan
