// ZeRO-3: parameters are sharded as well, gathered for their use and released after it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/follower.h"
#include "deepcompile/runtime/gathered.h"
#include "deepcompile/runtime/local_gradients.h"
#include "deepcompile/runtime/shards_in_place.h"
#include "deepcompile/runtime/state_offload.h"
#include "deepcompile/runtime/tensor_offload.h"

namespace dc {

// What ZeRO-3 needs beyond the other stages.
struct GatherResources {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<Stream> stream;
  std::shared_ptr<BufferPool> pool;
};

class Z3CustomOpExecutor : public CustomOpExecutor {
 public:
  Z3CustomOpExecutor(std::int64_t graph_id, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                     std::shared_ptr<DSParamRegistry> param_registry,
                     std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets, std::vector<std::int64_t> ds_ids,
                     std::shared_ptr<Communicator> comm, std::shared_ptr<Stream> rs_stream,
                     std::shared_ptr<Stream> copy_stream, GatherResources gather, bool pre_div_reduce,
                     std::shared_ptr<Context> context = nullptr);

  const char* stageName() const override { return reduce_at_update_ ? "ZeRO-3 that reduces before updates" : "ZeRO-3"; }
  // From now on gradients add up on each rank and travel only in the backward before an update. With parameters that
  // stay gathered this is ZeRO-1.
  void reduceAtUpdate() { reduce_at_update_ = true; }
  void startForward() override;
  void holdShards(bool hold) override;
  void endReads() override;
  void startBackward(bool update) override;
  void endBackward() override;
  at::Tensor reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) override;

  // The gathered parameter, cast to `dtype` before it travels. Readable after waitAllgather. A valid copy is returned
  // as it is; nothing is launched then.
  at::Tensor allgatherParam(std::int64_t ds_id, std::optional<at::ScalarType> dtype);
  // Starts the gathers that are not there yet as one communication.
  void prefetchParamsFused(const std::vector<std::int64_t>& ds_ids,
                           const std::optional<std::vector<at::ScalarType>>& dtypes);
  // Orders the caller after the gather that made `v` (or, where `v` is a dummy, after all gathers of the parameter).
  void waitAllgather(const at::Tensor& v, std::int64_t ds_id);
  // Counts one of `n_users` uses; after the last, frees the storage unless the parameter is persistent or another graph
  // still holds it.
  void releaseParam(std::int64_t ds_id, std::int64_t n_users, ReleasedSize size = ReleasedSize::Zero);

  // The gathered parameter, readable at once. The memory belongs to the returned tensor and its views and goes back to
  // the pool with the last of them; with `keep`, or for a persistent parameter, a copy also stays for later gathers
  // until the shard changes. A copy that a prefetch has started is waited for and handed over. `backward`: called in a
  // backward pass (a forward that is run again). `traced`: by compiled code, whose tensors nobody guards against
  // writes.
  at::Tensor gatherShard(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool keep, bool backward = false,
                         bool traced = false);
  // What a leaf module does at its entry: all its parameters as one communication.
  void prefetchShards(const std::vector<std::int64_t>& ds_ids, const std::vector<at::ScalarType>& dtypes,
                      bool backward);

  // Gathers what autograd had saved, for as long as the returned tensor (true shape) or a view of it lives; where a
  // copy is there already, until that is released. An error when the shard has changed since `key` was made.
  at::Tensor gatherAgain(const GatherKey& key);

  // Debug: a gather's own backward is about to reduce, however often it runs.
  void allowReduction(std::int64_t ds_id);

  // From now on reads follow `follower` (null: none). A cycle that is open is given up.
  void follow(std::shared_ptr<ScheduleFollower> follower);
  const std::shared_ptr<ScheduleFollower>& follower() const { return follower_; }
  // A compiled graph begins to run. Its reads follow `schedule` (null: none) unless there is a follower, which knows
  // the whole step. The schedule's numbers stand for these `params`: equal layers may share a graph. `states` moves
  // what the schedule moves.
  void beginGraph(std::shared_ptr<const StepSchedule> schedule, std::vector<std::int64_t> params,
                  std::shared_ptr<StateOffload> states);
  // Ends a cycle that no backward has ended.
  void endCycle();

  void offloadParameter(std::int64_t ds_id);
  void reloadParameter(std::int64_t ds_id);

 protected:
  void flushReduceBucket(at::ScalarType scalar_type) override { reduceToOwners(scalar_type); }
  bool sendsTasksOneByOne() const override { return true; }
  bool communicates() const override { return !reduce_at_update_ || param_updated_; }
  void reductionsSettled() override;
  void accumulateLocally(const DSParam& param, const at::Tensor& grad) override { local_.add(param, grad); }
  at::Tensor withLocal(const DSParam& param, at::Tensor grad) override { return local_.take(param, std::move(grad)); }
  void discardLocal(std::int64_t ds_id) override { local_.discard(ds_id); }

 private:
  struct Wanted {
    std::int64_t id;
    at::ScalarType dtype;
  };
  struct Uses {
    std::int64_t n_users = 0;
    std::int64_t left = 0;
  };
  // A gather that has been given its memory.
  struct Launched {
    GatherPart part;    // the shard as it is, and the memory as a flat tensor; undefined where nothing has to be moved
    at::Tensor tensor;  // the same memory as the parameter
  };
  Launched prepare(const Wanted& wanted);
  GatherKey keyOf(const Wanted& wanted, const at::Tensor& shard) const;
  // The parameter where its shards lie, undefined where it has to be gathered. May meet the other ranks.
  at::Tensor overShards(const Wanted& wanted);
  // Registers such a copy, or takes up again one that was let go of and that nobody else has a tensor of; null where it
  // has to be gathered.
  GatheredParam* readInPlace(const Wanted& wanted, bool traced);
  GatheredParam* takeUpAgain(const Wanted& wanted);
  // Starts the gathers and returns the event after which they are complete.
  Event start(std::span<const Wanted> wanted, std::span<const Launched> launched);
  // Gathers and registers the copies; in a held step the small ones of all the step, too.
  void launch(std::span<const Wanted> wanted);
  void launch(const Wanted& wanted) { launch({&wanted, 1}); }
  void launchNow(std::span<const Wanted> wanted);
  void gatherTogether(std::vector<Wanted>& wanted);
  bool hasCurrentCopy(const Wanted& wanted);
  void hold(std::int64_t ds_id);
  // The graph needs the parameter no longer; the last graph to say so frees its copies.
  void drop(std::int64_t ds_id, ReleasedSize size);
  void freeCopies(std::int64_t ds_id, ReleasedSize size);
  void publishGradients();
  // Stops keeping the copy; its memory lives on in the tensors that were handed out. Where it is the shards themselves
  // and was read by compiled code, it stays to be taken up again.
  void letGo(const Wanted& wanted, bool traced = false);
  void forgetCopy(const Wanted& wanted);
  at::Tensor handOut(const GatheredParam& copy) const;
  void awaitCopy(GatheredParam& copy);
  // Does what the plan does before this read.
  ScheduleFollower::Step followRead(const ProgramEvent& event, bool traced = false);
  // The same where a compiled graph runs by a schedule of its own.
  ScheduleFollower::Step followGraph(const ProgramEvent& event);
  void serve(const ScheduledEvent& event);
  // `params`: whom the keys stand for; empty: they are ids.
  void startGathers(const std::vector<std::vector<CopyKey>>& gathers, std::span<const std::int64_t> params);
  void dropCopies(const std::vector<CopyKey>& keys);
  std::int64_t bytesOf(const Wanted& wanted) const;
  void record(RecordedOp::Kind kind, const Wanted& wanted, bool backward, const Timeline::Mark& start);

  const std::int64_t graph_id_;
  const GatherResources gather_;
  ShardsInPlace in_place_;
  IdSet read_in_place_;  // parameters of which the registry may have a copy that is the shards themselves
  // Small parameters that held steps have gathered by copying. From then on the first gather of such a step takes all
  // of them along, and they stay until its end: one meeting of the ranks instead of one for each.
  static constexpr std::int64_t kSmallBytes = 64 << 10;
  static constexpr std::int64_t kTogetherBytes = 4 << 20;
  std::map<std::pair<std::int64_t, at::ScalarType>, bool> together_;  // true while they stay
  std::int64_t together_bytes_ = 0;
  bool together_gathered_ = false;  // in the held step
  bool reduce_at_update_ = false;
  LocalGradients local_;
  std::shared_ptr<ScheduleFollower> follower_;
  std::shared_ptr<const StepSchedule> graph_schedule_;  // of the compiled graph that runs, until its last event
  std::vector<std::int64_t> graph_params_;              // whom its numbers stand for
  std::size_t graph_event_ = 0;                         // the next
  std::shared_ptr<StateOffload> states_;
  std::unordered_map<std::int64_t, Uses> uses_;     // of parameters partly released in this pass
  IdSet held_;                                      // gathered for this graph and not released by it
  std::unordered_map<std::int64_t, int> gathered_;  // debug: gathers that no reduction has answered yet
  IdSet reduced_;                                   // parameters with a reduction in this backward
  IdSet gathered_in_backward_;
  std::unordered_set<std::int64_t> reloading_;
  IdMap<std::string> release_messages_;  // made once: a release must be cheap
};

}  // namespace dc
