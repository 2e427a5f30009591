// Gathers the parameters of one graph, returns their copies to readers, and releases them: by a schedule, or on demand.
//
// The runtime's lock is held in every call.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/gathered.h"
#include "deepcompile/runtime/graph_members.h"
#include "deepcompile/runtime/ids.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/scheduled_reads.h"
#include "deepcompile/runtime/shards_in_place.h"
#include "deepcompile/runtime/small_parameters.h"
#include "deepcompile/runtime/tensor_offload.h"

namespace dc {

class ParameterGatherer {
 public:
  struct Parts {
    std::int64_t graph_id = 0;
    std::shared_ptr<DSParamRegistry> registry;
    std::shared_ptr<const GraphMembers> members;
    std::shared_ptr<Communicator> comm;
    std::shared_ptr<Stream> stream;
    std::shared_ptr<BufferPool> pool;
    std::shared_ptr<Context> context;
  };

  explicit ParameterGatherer(Parts parts);

  // -- the operators' way: a gather, a wait, a release each --

  // Starts gathering the parameter, cast to `dtype` before the gather. Readable after wait(). If there is a valid copy,
  // returns it and launches nothing. `backward`: called while a backward is open.
  at::Tensor gather(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool backward);
  // Starts gathers of all parameters without a valid copy, as one collective.
  void prefetch(const std::vector<std::int64_t>& ds_ids, const std::optional<std::vector<at::ScalarType>>& dtypes);
  // Orders the caller after the gather that made `v` (or, where `v` is a dummy, after all gathers of the parameter).
  void wait(const at::Tensor& v, std::int64_t ds_id);
  // Counts one of `n_users` uses; after the last, frees the storage unless the parameter is persistent or another graph
  // still holds it.
  void release(std::int64_t ds_id, std::int64_t n_users, ReleasedSize size = ReleasedSize::Zero);

  // -- reads, which follow a schedule if there is one --

  // The gathered parameter, readable at once. The memory belongs to the returned tensor and its views and goes back to
  // the pool with the last of them; with `keep`, or for a persistent parameter, a copy also stays for later gathers
  // until the shard changes. A copy that a prefetch has started is waited for and handed over. `backward`: called in a
  // backward pass (a forward that is run again). `traced`: by compiled code, whose tensors are not guarded against
  // writes.
  at::Tensor read(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool keep, bool backward = false,
                  bool traced = false);
  // Called at the entry of a leaf module: gathers all its parameters in one collective.
  void readGroup(const std::vector<std::int64_t>& ds_ids, const std::vector<at::ScalarType>& dtypes, bool backward);
  // Gathers a parameter again whose id autograd had saved. The copy lives as long as the returned tensor (of the
  // parameter's shape) or a view of it; an existing copy until its release. An error if the shard has changed since
  // `key` was made.
  at::Tensor readAgain(const GatherKey& key);

  // See ScheduledReads.
  void follow(std::shared_ptr<ScheduleFollower> follower) { dropCopies(schedule_.follow(std::move(follower))); }
  const std::shared_ptr<ScheduleFollower>& follower() const { return schedule_.follower(); }
  void endCycle() { dropCopies(schedule_.endCycle()); }
  void beginGraph(std::shared_ptr<const StepSchedule> schedule, std::vector<std::int64_t> params,
                  std::shared_ptr<StateOffload> states) {
    serve(schedule_.beginGraph(std::move(schedule), std::move(params), std::move(states)));
  }

  // -- passes --

  void beginForward();
  void beginBackward() { uses_.clear(); }
  // Called after all reads of the backward. `updates`: the shards are about to change, here or on other ranks.
  // `unsettled`: reductions are pending, so the shards do not change yet.
  void endBackward(bool updates, bool unsettled);
  // See CustomOpExecutor.
  void holdShards(bool hold);
  void endReads();

  void offload(std::int64_t ds_id);
  void reload(std::int64_t ds_id);

  std::int64_t bytesOf(const CopyKey& wanted) const;
  std::int64_t graphId() const { return parts_.graph_id; }

 private:
  using Wanted = CopyKey;
  struct Uses {
    std::int64_t n_users = 0;
    std::int64_t left = 0;
  };
  // A gather whose memory is allocated.
  struct Launched {
    GatherPart part;    // the shard, and the memory as a flat tensor; undefined if nothing has to be moved
    at::Tensor tensor;  // the same memory as the parameter
  };
  const DSParam& member(std::int64_t ds_id) const { return parts_.members->at(ds_id); }
  Launched prepare(const Wanted& wanted);
  GatherKey keyOf(const Wanted& wanted, const at::Tensor& shard) const;
  // A tensor over the shards in place; undefined if the parameter has to be gathered. May wait for the other ranks.
  at::Tensor overShards(const Wanted& wanted);
  // Registers such a copy, or reuses a released one to which no other tensor refers; null if the parameter has to be
  // gathered.
  GatheredParam* readInPlace(const Wanted& wanted, bool traced);
  GatheredParam* takeUpAgain(const Wanted& wanted);
  // Starts the gathers and returns the event after which they are complete.
  Event start(std::span<const Wanted> wanted, std::span<const Launched> launched);
  // Starts gathers and registers the copies. In a step with holdShards, also of all its small parameters.
  void launch(std::span<const Wanted> wanted);
  void launch(const Wanted& wanted) { launch({&wanted, 1}); }
  void launchNow(std::span<const Wanted> wanted);
  void gatherTogether(std::vector<Wanted>& wanted);
  void prefetchKeys(std::span<const CopyKey> keys);
  bool hasCurrentCopy(const Wanted& wanted);
  void hold(std::int64_t ds_id);
  // Ends this graph's hold on the parameter; the last graph to do so frees its copies.
  void drop(std::int64_t ds_id, ReleasedSize size);
  void freeCopies(std::int64_t ds_id, ReleasedSize size);
  // Stops keeping the copy; its memory lives as long as tensors that were returned to readers. A copy in place that
  // compiled code has read stays registered, to be reused by takeUpAgain().
  void letGo(const Wanted& wanted, bool traced = false);
  void forgetCopy(const Wanted& wanted);
  at::Tensor handOut(const GatheredParam& copy) const;
  void awaitCopy(GatheredParam& copy);
  // Does what the schedule has for this event.
  ScheduledReads::Step followRead(const ProgramEvent& event, bool traced = false);
  void serve(const ScheduledReads::Step& step);
  void dropCopies(const std::vector<CopyKey>& keys);
  // Logs a read that began at `entered`, was launched at `launched`, and ends now.
  void traceRead(const Wanted& wanted, bool backward, bool gathers, const StepTrace::Moment& entered,
                 const StepTrace::Moment& launched);

  const Parts parts_;
  ScheduledReads schedule_;
  ShardsInPlace in_place_;
  IdSet read_in_place_;  // parameters of which the registry may have a copy in place
  SmallParameters small_;
  std::unordered_map<std::int64_t, Uses> uses_;  // of parameters partly released in this pass
  IdSet held_;                                   // gathered for this graph and not released by it
  IdSet gathered_in_backward_;
  std::unordered_set<std::int64_t> reloading_;
  IdMap<std::string> release_messages_;  // made once: a release must be cheap
};

}  // namespace dc
