// One runtime per process group: parameters, graphs, streams, communicators and buffers, made and destroyed together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/reduce_bucket.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/state_offload.h"
#include "deepcompile/runtime/watchdog.h"
#include "deepcompile/runtime/z3_executor.h"

namespace dc {

// The channels of a runtime. Where both are the same object, gathers and reductions share a stream: on one channel all
// ranks must run everything in one order.
struct Channels {
  std::shared_ptr<Communicator> gather;
  std::shared_ptr<Communicator> reduce;
  // For agreements, apart from the others where possible: a rank that agrees alone waits, and disturbs nothing. Null:
  // the gather channel.
  std::shared_ptr<Communicator> control = nullptr;
};

struct ParamOptions {
  std::string name;                            // for messages
  std::optional<at::ScalarType> reduce_dtype;  // the gradient buffer's when not given
};

class Runtime {
 public:
  // Parameters live on `device`. `local_ranks` is the number of ranks on this host, which share its cores. `roll_call`
  // (may be empty) says which ranks do not answer; for messages, when an operation did not end.
  Runtime(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::shared_ptr<Context> context, Channels channels,
          std::int64_t initial_reduce_bucket_size, int local_ranks, at::Device device = at::kCPU,
          std::function<std::string()> roll_call = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ZeRO-1 and 2.
  void registerParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                     at::Tensor grad_buffer, std::int64_t offset, const ParamOptions& options = {});
  void registerZ3Param(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                       at::Tensor grad_buffer, bool persistent, const ParamOptions& options = {});
  void registerGraphZ1(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids);
  void registerGraphZ2(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids);
  // With `reduce_at_update` gradients travel only in the backward before an update.
  void registerGraphZ3(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids, bool reduce_at_update = false);
  // An executor of the caller's own.
  void registerGraph(std::int64_t graph_id, std::shared_ptr<CustomOpExecutor> executor);

  void setPersistent(std::int64_t ds_id);
  // A frozen parameter (ZeRO-3) gets a place for its gradient, or a trained one loses it. Between steps; the ranks
  // agree on it at the next start_forward.
  void setGradBuffer(std::int64_t ds_id, at::Tensor grad_buffer, std::optional<at::ScalarType> reduce_dtype);
  // See GradientReducer::plan.
  void planReductions(std::int64_t graph_id, std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight = 2);
  // Between backwards: what was accumulated of these parameters since the last update is thrown away, so that the next
  // backward begins a sum. Gradients that the shards show are the caller's to clear. All ranks call it.
  void discardGradients(const std::vector<std::int64_t>& ds_ids);
  // After an update: gradients that nobody holds take no memory until the next backward makes them.
  void letGradientsGo();
  // See BufferPool::limitIdle; of memory for gathered parameters.
  void limitIdleMemory(std::int64_t bytes);
  // See Context::small_together.
  void gatherSmallTogether(bool together);
  // The peak of gathered bytes counts from now on, and what the pool holds by it.
  void resetGatheredPeak() {
    pool_->resetCounts();
    pool_->forgetMost();
  }
  void startForward();
  // See CustomOpExecutor::holdShards; after startForward.
  void holdShards(bool hold);
  // Returns when every rank has done with what it read of shards in place. All ranks call it.
  void endReads();
  // While true no wait belongs to a step, so none has the longer deadline of the first one. The same on all ranks.
  void setOutsideStep(bool outside);
  void endForward();
  // With `settle_later` a backward that no update follows ends without a wait for its reductions: the next backward, a
  // read of a gradient of a ZeRO-3 shard, or settle() waits for them. The same on all ranks.
  void startBackward(bool update, bool settle_later = false);
  // Waits for the reductions that backwards have left running. On this rank alone, so an error when some rank had more
  // gradients than expected, which only the next backward can put in order.
  void settle();
  void enableProfiling(bool enable) { context_->profiling = enable; }
  bool isProfiling() const { return context_->profiling; }
  // Forgets all graphs and gathered parameters; the parameters stay.
  void reset();
  // The next gather of the parameter travels again, persistent or not. Frees what was gathered.
  void invalidateGatheredParam(std::int64_t ds_id);
  void clearAllGatheredParams();

  // The sum over all ranks, in place and in the caller's order. A collective; behind the reductions in flight.
  void sumOverRanks(const at::Tensor& tensor);

  // Waits for what is in flight and lets go of everything. Errors of work in flight are logged, not thrown.
  void close();

  // All ranks have registered the same; cheap when nothing was registered since the last call. Lock held.
  void ensureAgreed();
  bool agreed() const { return agreed_; }

  // Gives the communicators the timeout now in force: longer until the first step has ended.
  void setTimeouts();

  Context& context() { return *context_; }
  const std::shared_ptr<Context>& sharedContext() const { return context_; }
  DSParamRegistry& registry() { return *registry_; }
  const std::shared_ptr<DSParamRegistry>& sharedRegistry() const { return registry_; }
  const std::shared_ptr<DoubleBufferedReduceBucket>& reduceBuckets() const { return reduce_buckets_; }
  const Channels& channels() const { return channels_; }
  BufferPool& pool() { return *pool_; }
  const HostCopies& hostCopies() const { return *host_copies_; }
  const std::shared_ptr<StateOffload>& states() const { return states_; }
  // Whether moving states to the host frees memory of the device (or is to be done all the same, for tests).
  bool hostIsApart() const;
  const std::shared_ptr<Stream>& reduceStream() const { return reduce_stream_; }
  const std::shared_ptr<Stream>& copyStream() const { return copy_stream_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& processGroup() const { return process_group_; }
  CpuStreamMode streamMode() const { return mode_; }
  at::Device device() const { return device_; }
  std::int64_t parameterCount() const { return static_cast<std::int64_t>(registry_->getIds().size()); }

 private:
  void addParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                at::Tensor grad_buffer, bool partitioned, std::int64_t offset, bool persistent,
                const ParamOptions& options);
  void addGraph(std::int64_t graph_id, std::shared_ptr<CustomOpExecutor> executor);
  void checkGraphIds(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids, bool partitioned) const;
  void freeGathered(std::int64_t ds_id);
  // By all ranks together; lock held.
  void settleTogether();
  void forgetGraphs();
  void checkOpen() const;
  std::string facts() const;
  std::shared_ptr<Watchdog> makeWatchdog();
  std::shared_ptr<Stream> makeStream(const char* name, CpuStreamMode cpu_mode) const;
  // An operation did not end: whatever is asked of the runtime from now on fails with this.
  void giveUp(const std::string& what, const std::string& why);
  void abortChannels();

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const std::shared_ptr<Context> context_;
  Channels channels_;
  const std::int64_t bucket_size_;
  const std::shared_ptr<DSParamRegistry> registry_;
  const at::Device device_;
  const std::shared_ptr<BufferPool> pool_;
  std::int64_t most_idle_ = BufferPool::kAll;  // of pool_; in the backwards of a device a little at most
  std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets_;
  const CpuStreamMode mode_;  // where the device is the CPU
  const std::function<std::string()> roll_call_;
  std::shared_ptr<Watchdog> watchdog_;  // of a device's streams; null on CPU
  std::shared_ptr<Stream> gather_stream_;
  std::shared_ptr<Stream> reduce_stream_;
  std::shared_ptr<Stream> copy_stream_;
  std::shared_ptr<Stream> offload_stream_;
  std::shared_ptr<Stream> reload_stream_;
  const std::shared_ptr<HostCopies> host_copies_;
  const std::shared_ptr<StateOffload> states_;
  std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>> executors_;
  bool agreed_ = false;
  bool ran_forward_ = false;
  bool update_pending_ = false;  // an update follows the last backward: what is gathered will be out of date
  bool open_ = true;
};

// The runtime behind the free functions of the package; null before init and after cleanup.
std::shared_ptr<Runtime> defaultRuntime();
void setDefaultRuntime(std::shared_ptr<Runtime> runtime);

}  // namespace dc
