// What one graph does with its parameters: the base of the executors of the three stages.
//
// A thin layer over the reducer of its gradients (and, under ZeRO-3, the gatherer of its parameters). The runtime's
// lock is held in every call. It can be subclassed from outside the project: register an instance with
// Runtime::registerGraph.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/gradient_reducer.h"

namespace dc {

class CustomOpExecutor {
 public:
  // `process_group` may be null where the communicator is not made of one. `comm` and `rs_stream` carry the reductions,
  // `copy_stream` the copies into the buckets. Without a `context` the executor makes one with the default
  // configuration.
  CustomOpExecutor(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                   std::shared_ptr<DSParamRegistry> param_registry,
                   std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets, std::vector<std::int64_t> ds_ids,
                   std::shared_ptr<Communicator> comm, std::shared_ptr<Stream> rs_stream,
                   std::shared_ptr<Stream> copy_stream, bool pre_div_reduce,
                   std::shared_ptr<Context> context = nullptr);
  virtual ~CustomOpExecutor() = default;
  CustomOpExecutor(const CustomOpExecutor&) = delete;
  CustomOpExecutor& operator=(const CustomOpExecutor&) = delete;

  virtual void startForward() {}
  virtual void endForward() {}
  // The program's promise that no rank changes a shard from here until the backward before an update ends, so that
  // shards may be read in place. All ranks call it, in each forward for which it holds. `hold` false ends the promise.
  virtual void holdShards(bool hold) {}
  // Returns when all ranks have finished their reads in place; then shards may change. All ranks call it.
  virtual void endReads() {}
  // `update` says that an optimizer step follows this backward.
  virtual void startBackward(bool update) { reducer_.begin(update); }
  virtual void endBackward() { reducer_.end(); }
  // Takes a gradient of the whole parameter. Returns an empty tensor. Opens a backward when none is open.
  virtual at::Tensor reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) {
    return reducer_.take(std::move(grad_tensor), ds_id, memory_);
  }
  // reduceGrad with a choice of who owns the gradient's memory: if it is donated it need not be copied, and lives until
  // it is reduced.
  at::Tensor reduceGradIn(at::Tensor grad_tensor, std::int64_t ds_id, GradientMemory memory) {
    memory_ = memory;
    const auto end = c10::make_scope_exit([this] { memory_ = GradientMemory::Borrowed; });
    return reduceGrad(std::move(grad_tensor), ds_id);
  }

  GradientReducer& reducer() { return reducer_; }
  bool hasParam(std::int64_t ds_id) const { return members_->contains(ds_id); }
  const std::vector<std::int64_t>& getIds() const { return ds_ids_; }
  // "ZeRO-3" and so on; must be the same on all ranks.
  virtual const char* stageName() const { return "an executor of its own"; }
  const std::shared_ptr<Context>& context() const { return context_; }

 protected:
  // Reduces the bucket of this dtype. A stage of your own calls blockCopyEvents, applyPreDivision, its collective with
  // getReductionOp, and performCleanup; GradientReducer::reduceToOwners does all four.
  virtual void flushReduceBucket(at::ScalarType scalar_type) = 0;
  // True for stages that flush by reduceToOwners, or otherwise send each task's getSendBuf() and not the bucket: then
  // gradients may stay where they lie instead of being copied into the bucket.
  virtual bool sendsTasksOneByOne() const { return false; }
  // Called when pending reductions have been settled: the caller is ordered after them.
  virtual void reductionsSettled() {}

  void flushAllReduceBuckets() { reducer_.flushAll(); }
  // The reduction waits for the copies into the bucket.
  void blockCopyEvents(at::ScalarType) { reducer_.waitForCopies(); }
  void applyPreDivision(at::ScalarType scalar_type) { reducer_.divideBeforeTheSum(scalar_type); }
  ReduceOp getReductionOp() const { return reducer_.op(); }
  // Forgets the tasks and swaps the buckets.
  void performCleanup(at::ScalarType scalar_type) { reducer_.cleanUp(scalar_type); }

  const std::shared_ptr<const GraphMembers>& members() const { return members_; }
  // Where an error happened: "rank 1 of 3".
  const std::string& place() const { return context_->place; }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::shared_ptr<DSParamRegistry> param_registry_;
  std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets_;
  std::vector<std::int64_t> ds_ids_;
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Stream> rs_stream_;
  std::shared_ptr<Stream> copy_stream_;
  bool pre_div_reduce_;
  std::shared_ptr<Context> context_;

 private:
  std::shared_ptr<const GraphMembers> members_;
  GradientReducer reducer_;
  GradientMemory memory_ = GradientMemory::Borrowed;  // of the gradient that reduceGrad is called with

 protected:
  // References to the reducer's members, for subclasses.
  std::map<at::ScalarType, std::vector<ReduceTask>>& reduce_tasks_;
  IdSet& has_acc_grad_;
  const bool& param_updated_;
};

// The executor of a graph as type T; an error when there is none or it is of another stage.
template <typename T, typename U>
std::shared_ptr<T> getExecutor(std::int64_t graph_id,
                               const std::unordered_map<std::int64_t, std::shared_ptr<U>>& executors) {
  const auto found = executors.find(graph_id);
  check(found != executors.end(), [&] { return concat("no graph with id ", graph_id, " is registered"); });
  auto executor = std::dynamic_pointer_cast<T>(found->second);
  check(executor != nullptr, [&] { return concat("graph ", graph_id, " is registered for another ZeRO stage"); });
  return executor;
}

}  // namespace dc
