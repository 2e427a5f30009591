// What one graph does with its parameters: the base of the executors of the three stages.
//
// The runtime's lock is held in every call. The base takes gradients in, orders them, fills buckets and reduces each
// bucket to the owners of its slices; a stage adds what is its own. It can be subclassed from outside the project:
// register an instance with Runtime::registerGraph.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/gradients_in_flight.h"
#include "deepcompile/runtime/reduce_bucket.h"
#include "deepcompile/runtime/reduction_order.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/stream.h"

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
  virtual ~CustomOpExecutor();
  CustomOpExecutor(const CustomOpExecutor&) = delete;
  CustomOpExecutor& operator=(const CustomOpExecutor&) = delete;

  virtual void startForward() {}
  virtual void endForward() {}
  // No rank changes a shard from here until the backward before an update ends: they may be read where they lie. Called
  // by all ranks, before each forward of which that is known.
  // `hold` false: that ends here.
  virtual void holdShards(bool hold) {}
  // Orders changes of shards after all that was read of them in place. All ranks call it.
  virtual void endReads() {}
  // `update` says that an optimizer step follows this backward.
  virtual void startBackward(bool update);
  // Contributes zeros for parameters without a gradient, reduces what is left and orders the caller after it (or
  // leaves that to settle). Does nothing when no backward is open.
  virtual void endBackward();
  // Takes a gradient of the whole parameter. Returns an empty tensor. Opens a backward when none is open.
  virtual at::Tensor reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id);
  // The same for a gradient that nobody writes to any more: it need not be copied, and lives until it is reduced.
  at::Tensor reduceGivenGrad(at::Tensor grad_tensor, std::int64_t ds_id, bool for_good = false);

  // The backward that is opened next may end without a wait for its reductions; settle has it. The same on all ranks.
  void settleLater(bool later) { settle_later_ = later; }
  // Waits for what the last backward left running and does what was to be done after it. All ranks call it before they
  // open the next backward; gradients that some rank had beyond the expected ones are reduced here.
  void settle();
  // The same at a moment of this rank's own. Throws when there are gradients beyond the expected ones.
  void settleAlone();

  // Between backwards: what backwards since the last update have accumulated of these parameters is thrown away. All
  // ranks call it.
  void discardGradients(const std::vector<std::int64_t>& ds_ids);

  // The autograd run that the next gradient belongs to (below 0: none). An implicit backward of another run was given
  // up.
  void noteAutogradTask(std::int64_t task);

  // Reduces these parameters together, each list as soon as its last gradient is there; what no list holds goes by the
  // bucket size. No more than `in_flight` reductions hold gradients at once: a further one waits for the oldest. Not
  // while a backward is open; the same on all ranks.
  void planReductions(std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight = kReductionsInFlight);
  static constexpr std::size_t kReductionsInFlight = 2;
  // What is trainable has changed: the order of the gradients is learned again.
  void forgetOrder();

  bool hasParam(std::int64_t ds_id) const { return members_.contains(ds_id); }
  const std::vector<std::int64_t>& getIds() const { return ds_ids_; }
  // True between startBackward (or the first gradient) and endBackward.
  bool backwardOpen() const { return backward_open_; }
  // True when the open backward was opened by a gradient and not by startBackward.
  bool backwardImplicit() const { return implicit_; }
  // "ZeRO-3" and so on: what the ranks must agree on.
  virtual const char* stageName() const { return "an executor of its own"; }
  // The order in which gradients enter the buckets, the same on all ranks; empty before the first backward.
  std::vector<std::int64_t> reductionOrder() const { return order_ ? order_->expected() : std::vector<std::int64_t>(); }
  // Reduces what the buckets hold after these places of reductionOrder(), in place of where planReductions would;
  // empty: as that says. The same on all ranks, from the next backward on.
  void planFlushes(std::vector<bool> after);
  // Parameters that no rank had a gradient for in the last backward.
  const IdSet& withoutGradient() const { return without_gradient_; }

  const std::shared_ptr<Context>& context() const { return context_; }

 protected:
  // Reduces the bucket of this dtype. A stage of your own calls blockCopyEvents, applyPreDivision, its collective with
  // getReductionOp, and performCleanup; reduceToOwners does all four.
  virtual void flushReduceBucket(at::ScalarType scalar_type) = 0;
  // True for stages that flush by reduceToOwners, or otherwise send each task's getSendBuf() and not the bucket: then
  // gradients may stay where they lie instead of being copied into the bucket.
  virtual bool sendsTasksOneByOne() const { return false; }
  // False while gradients only add up on this rank.
  virtual bool communicates() const { return true; }
  // Keeps a gradient on this rank until a backward that communicates.
  virtual void accumulateLocally(const DSParam& param, const at::Tensor& grad);
  // The gradient that enters the bucket: `grad` (undefined: none) and what was kept on this rank.
  virtual at::Tensor withLocal(const DSParam& param, at::Tensor grad) { return grad; }

  // Throws away what accumulateLocally kept.
  virtual void discardLocal(std::int64_t ds_id) {}

  // The caller is ordered after all reductions of the last backward.
  virtual void reductionsSettled() {}
  // True between a backward that ended without a wait for its reductions and settle.
  bool unsettled() const { return unsettled_; }

  void flushAllReduceBuckets();
  // The reduction waits for the copies into the bucket.
  void blockCopyEvents(at::ScalarType scalar_type);
  void applyPreDivision(at::ScalarType scalar_type);
  ReduceOp getReductionOp() const { return dividesBucket() ? ReduceOp::Sum : ReduceOp::Average; }
  // Forgets the tasks and swaps the buckets.
  void performCleanup(at::ScalarType scalar_type);
  void reduceToOwners(at::ScalarType scalar_type);

  // Throws unless `ds_id` is one of this graph's.
  const DSParam& member(std::int64_t ds_id) const;
  // Where an error happened: "rank 1 of 3".
  const std::string& place() const { return context_->place; }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::shared_ptr<DSParamRegistry> param_registry_;
  std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets_;
  std::vector<std::int64_t> ds_ids_;
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Stream> rs_stream_;
  std::shared_ptr<Stream> copy_stream_;
  // Ordered, so that all ranks flush the dtypes in one order.
  std::map<at::ScalarType, std::vector<ReduceTask>> reduce_tasks_;
  // Shared by all graphs of the runtime: parameters whose gradient buffer is to be added to.
  IdSet& has_acc_grad_;
  bool param_updated_ = true;
  bool pre_div_reduce_;
  std::shared_ptr<Context> context_;

 private:
  // True when the bucket is divided in a pass of its own, before the sum.
  bool dividesBucket() const { return pre_div_reduce_ && !comm_->averageDividesFirst(); }
  void openBackward(bool update);
  void abandonBackward();
  const at::Tensor& emptyLike(const at::Tensor& grad);
  std::vector<std::int64_t> newly_accumulated_;  // in the backward that is open, or was last
  void reduceSurplus();
  void enter(const ArrivedGradient& arrived);
  // The next gradients of the expected order; flushes where a planned bucket ends.
  void enterInOrder(const std::vector<ArrivedGradient>& arrived);
  // While a backward is open on this thread its gradients are made where they travel from.
  void placeGradients();
  // True when the gradient can be reduced from its own memory.
  bool goesAsItIs(const DSParam& param, const at::Tensor& grad) const;
  // Adds to the gradient buffer or overwrites it, as the accumulation rule says. Returns whether to add.
  bool noteAccumulation(const DSParam& param);
  void checkGradient(const DSParam& param, const at::Tensor& grad) const;
  void learnOrder();
  // Where in the expected order the planned buckets end.
  void placeFlushes();
  void readPresence();
  // True when the open backward may end without a wait. Never depends on the rank: where gradients come beyond the
  // expected ones, all ranks meet at the same place.
  bool mayLeaveRunning() const;
  bool anySurplus(bool mine);
  void finishSettling();

  // Which parameters of a flushed bucket any rank had a gradient for: read only when this rank lacked one.
  struct Presence {
    std::vector<std::int64_t> ids;
    std::shared_ptr<const at::Tensor> counts;  // there when the reduction has run
  };

  IdSet members_;
  std::optional<ReductionOrder> order_;  // made at the first backward, when the ranks have agreed on what is trainable
  bool order_learned_ = false;
  std::shared_ptr<const std::unordered_set<std::size_t>> gradient_bytes_;  // the sizes of gradients that travel
  std::vector<std::vector<std::int64_t>> planned_buckets_;
  std::unordered_set<std::size_t> flush_after_;  // positions in the expected order
  std::int64_t planned_size_ = 0;                // elements of the largest planned bucket
  std::size_t reductions_in_flight_ = kReductionsInFlight;
  GradientsInFlight copied_;        // on their way into a bucket
  GradientsInFlight reduced_from_;  // reduced from where they lie
  std::size_t entered_ = 0;         // gradients of the expected order that have entered in this backward
  bool backward_open_ = false;
  bool implicit_ = false;
  bool given_ = false;  // during reduceGivenGrad
  bool given_for_good_ = false;
  std::map<at::ScalarType, at::Tensor> empty_;  // what reduceGrad returns
  bool ending_ = false;                         // while endBackward flushes what is left
  std::int64_t autograd_task_ = -1;
  IdSet present_;  // parameters that this rank has had a gradient for in this backward
  std::vector<Presence> presence_;
  std::shared_ptr<const at::Tensor> last_presence_;  // of the bucket that was flushed last
  IdSet without_gradient_;
  bool settle_later_ = false;
  bool unsettled_ = false;
  bool had_surplus_ = false;  // then every backward is waited for
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
