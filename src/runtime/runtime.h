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

// The channels of a runtime. If `gather` and `reduce` are the same object, gathers and reductions share a stream,
// because on one channel all ranks must run all operations in one order.
struct Channels {
  std::shared_ptr<Communicator> gather;
  std::shared_ptr<Communicator> reduce;
  // For agreements; separate if possible, so that a rank that waits there alone does not disturb gathers and
  // reductions. Null: the gather channel.
  std::shared_ptr<Communicator> control = nullptr;
};

struct ParamOptions {
  std::string name;                            // for messages
  std::optional<at::ScalarType> reduce_dtype;  // the gradient buffer's when not given
};

// On which a runtime's operations run.
struct Streams {
  std::shared_ptr<Stream> gather;
  std::shared_ptr<Stream> reduce;
  std::shared_ptr<Stream> copy;  // of gradients into buckets
  std::shared_ptr<Stream> offload;
  std::shared_ptr<Stream> reload;
};

class Runtime {
 public:
  // Parameters live on `device`. `local_ranks` is the number of ranks on this host, which share its cores. `roll_call`
  // (may be empty) returns which ranks do not answer, for the message when an operation did not end.
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
  // Gives a frozen ZeRO-3 parameter a gradient buffer, or takes it from a trained one. Called between steps; the ranks
  // compare at the next start_forward.
  void setGradBuffer(std::int64_t ds_id, at::Tensor grad_buffer, std::optional<at::ScalarType> reduce_dtype);
  // See GradientReducer::plan.
  void planReductions(std::int64_t graph_id, std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight = 2);
  // Discards what was accumulated for these parameters since the last update, so that the next backward begins a new
  // sum. The caller must clear shard.grad itself. All ranks call it, between backwards.
  void discardGradients(const std::vector<std::int64_t>& ds_ids);
  // After an update: frees the memory of gradient buffers to which the program holds no reference, until the next
  // backward.
  void letGradientsGo();
  // See BufferPool::limitIdle; for the memory of gathered parameters.
  void limitIdleMemory(std::int64_t bytes);
  // See Context::small_together.
  void gatherSmallTogether(bool together);
  // Restarts the peak of gathered bytes, up to which the pool keeps memory.
  void resetGatheredPeak() {
    pool_->resetCounts();
    pool_->forgetMost();
  }
  void startForward();
  // See CustomOpExecutor::holdShards; after startForward.
  void holdShards(bool hold);
  // Returns when every rank has finished its reads in place. All ranks call it.
  void endReads();
  // While true, waits have the normal deadline, not the longer one of the first step. The same on all ranks.
  void setOutsideStep(bool outside);
  void endForward();
  // With `settle_later` a backward that no update follows ends without waiting for its reductions: the next backward, a
  // read of a ZeRO-3 shard's gradient, or settle() waits for them. The same on all ranks.
  void startBackward(bool update, bool settle_later = false);
  // Waits for the reductions that backwards have left running. May be called by one rank alone; therefore an error if
  // some rank had surplus gradients, which need a collective (the next backward reduces them).
  void settle();
  void enableProfiling(bool enable) { context_->profiling = enable; }
  bool isProfiling() const { return context_->profiling; }
  // Forgets all graphs and gathered parameters; the parameters stay.
  void reset();
  // Frees the parameter's copies, so that the next read gathers again, persistent or not.
  void invalidateGatheredParam(std::int64_t ds_id);
  void clearAllGatheredParams();

  // Sums over all ranks, in place and in the caller's order. A collective; runs after the reductions in flight.
  void sumOverRanks(const at::Tensor& tensor);

  // Waits for work in flight and frees everything. Errors of work in flight are logged, not thrown.
  void close();

  // Throws unless all ranks have registered the same. Cheap if nothing was registered since the last call. Lock held.
  void ensureAgreed();
  bool agreed() const { return agreed_; }

  // Tells the communicators the present timeout, which is longer until the first step has ended.
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
  // Whether moving states to the host frees memory of the device (or is simulated on a CPU, for tests).
  bool hostIsApart() const;
  const std::shared_ptr<Stream>& reduceStream() const { return streams_.reduce; }
  const std::shared_ptr<Stream>& copyStream() const { return streams_.copy; }
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
  // Called by all ranks; lock held.
  void settleTogether();
  void forgetGraphs();
  void checkOpen() const;
  std::string facts() const;
  std::shared_ptr<Watchdog> makeWatchdog();
  std::shared_ptr<Stream> makeStream(const char* name, CpuStreamMode cpu_mode) const;
  Streams makeStreams() const;
  // Called when an operation did not end: every later call of the runtime fails with this error.
  void giveUp(const std::string& what, const std::string& why);
  void abortChannels();

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const std::shared_ptr<Context> context_;
  Channels channels_;
  const std::int64_t bucket_size_;
  const std::shared_ptr<DSParamRegistry> registry_;
  const at::Device device_;
  const std::shared_ptr<BufferPool> pool_;
  std::int64_t most_idle_ = BufferPool::kAll;  // limit of pool_'s idle memory; lower in backwards on a device
  std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets_;
  const CpuStreamMode mode_;  // where the device is the CPU
  const std::function<std::string()> roll_call_;
  std::shared_ptr<Watchdog> watchdog_;  // of a device's streams; null on CPU
  const Streams streams_;
  const std::shared_ptr<HostCopies> host_copies_;
  const std::shared_ptr<StateOffload> states_;
  std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>> executors_;
  bool agreed_ = false;
  bool ran_forward_ = false;
  bool update_pending_ = false;  // an update follows the last backward, which will make all copies stale
  bool open_ = true;
};

// The runtime behind the free functions of the package; null before init and after cleanup.
std::shared_ptr<Runtime> defaultRuntime();
void setDefaultRuntime(std::shared_ptr<Runtime> runtime);

}  // namespace dc
