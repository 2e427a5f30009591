// What the gatherer does when forwards, backwards and steps with holdShards begin and end.
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/parameter_gatherer.h"

namespace dc {

void ParameterGatherer::beginForward() {
  uses_.clear();
  schedule_.endGraph();
  in_place_.hold(false);
}

void ParameterGatherer::endBackward(bool updates, bool unsettled) {
  // Gathers in flight read the shards that the optimizer is about to change, here or on other ranks.
  if (parts_.comm->readsPeers() && updates && parts_.comm->size() > 1) {
    runCollective(
        *parts_.stream, [place = parts_.context->place] { return concat("ending the reads of shards on ", place); },
        [comm = parts_.comm] { comm->endReads(); });
  }
  if (updates) {
    endReads();
  }
  if (unsettled) {
    // The shards stay as they are, so the gathers that read them need not be waited for.
    for (const std::int64_t id : parts_.members->ids()) {
      settleBeforeReads(parts_.registry->getParam(id).getDSTensor(), parts_.context->unsettled);
    }
  } else {
    parts_.context->await(parts_.stream->record());
  }
  for (const std::int64_t id : reloading_) {
    parts_.registry->getParam(id).getDSTensor();
  }
  reloading_.clear();
  // A forward that was run again in the backward (checkpointing) may have stopped before its releases.
  for (const std::int64_t id : std::exchange(gathered_in_backward_, {}).ids()) {
    drop(id, ReleasedSize::Zero);
  }
}

void ParameterGatherer::holdShards(bool hold) {
  in_place_.hold(hold);
  small_.begin();
  if (parts_.comm->readsPeers()) {
    parts_.comm->holdReads(hold);  // on a device: the communicator runs in the caller's order
  }
}

void ParameterGatherer::endReads() {
  for (const std::int64_t id : std::exchange(read_in_place_, {}).ids()) {
    const CopyKey wanted{id, parts_.registry->getParam(id).getDtype()};  // copies in place have the shard's dtype
    const GatheredParam* const copy = parts_.registry->findGathered(id, wanted.dtype);
    if (copy != nullptr && copy->in_place && !copy->let_go) {
      forgetCopy(wanted);
    }
  }
  small_.end([this](const CopyKey& key) {
    if (--parts_.registry->holders(key.id) == 0 && !parts_.registry->getParam(key.id).isPersistent()) {
      forgetCopy(key);
    }
  });
  in_place_.end();
}

void ParameterGatherer::offload(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (param.isOffloaded()) {
    return;
  }
  endReads();
  parts_.context->await(parts_.stream->record());  // a gather in flight may read the shard
  parts_.context->stats.bytes_offloaded.fetch_add(static_cast<std::int64_t>(param.getDSTensor().nbytes()),
                                                  std::memory_order_relaxed);
  parts_.registry->offload(ds_id);
}

void ParameterGatherer::reload(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (!param.isOffloaded()) {
    return;
  }
  parts_.registry->reload(ds_id);
  parts_.context->stats.bytes_reloaded.fetch_add(
      static_cast<std::int64_t>(param.getPaddedNumel() / parts_.comm->size() * c10::elementSize(param.getDtype())),
      std::memory_order_relaxed);
  reloading_.insert(ds_id);
}

}  // namespace dc
