// Accepts the gradients of one graph, orders them, fills buckets, and reduces each bucket to the owners of its slices.
//
// The ZeRO stages differ in when gradients are reduced (GradientsTravel) and how a full bucket is reduced (Stage).
// The runtime's lock is held in every call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/gradient_order.h"
#include "deepcompile/runtime/gradient_presence.h"
#include "deepcompile/runtime/gradients_in_flight.h"
#include "deepcompile/runtime/graph_members.h"
#include "deepcompile/runtime/local_gradients.h"
#include "deepcompile/runtime/reduce_bucket.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// Who owns the memory of a gradient after the call that hands it over.
enum class GradientMemory : std::uint8_t {
  Borrowed,        // the caller, who may write to it once the call has returned
  Donated,         // the reducer: no other code writes to it any more, but the caller may still read it
  DonatedForGood,  // the reducer: no other code writes to it or reads it
};

enum class GradientsTravel : std::uint8_t {
  InEveryBackward,
  BeforeAnUpdate,  // until then they add up on each rank (ZeRO-1)
};

class GradientReducer {
 public:
  struct Parts {
    std::shared_ptr<DSParamRegistry> registry;
    std::shared_ptr<DoubleBufferedReduceBucket> buckets;
    std::shared_ptr<const GraphMembers> members;
    std::shared_ptr<Communicator> comm;
    std::shared_ptr<Stream> reduce_stream;
    std::shared_ptr<Stream> copy_stream;
    std::shared_ptr<Context> context;
    bool divides_before_the_sum = false;
  };
  // What differs by stage. Called by the reducer, with the lock held.
  struct Stage {
    std::function<void(at::ScalarType)> flush;  // reduces the bucket of this dtype
    // True where flush sends each task's getSendBuf() and not the bucket: then gradients may stay where they lie.
    std::function<bool()> sends_tasks_one_by_one;
    std::function<void()>
        settled;  // the caller is ordered after all reductions of a backward that had left them running
  };
  enum class Phase : std::uint8_t {
    Closed,
    Open,       // gradients come
    Ending,     // what is left is flushed
    Unsettled,  // closed, with reductions that run on
  };

  GradientReducer(Parts parts, Stage stage);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  void travel(GradientsTravel travel) { travel_ = travel; }
  // False while gradients only add up on this rank.
  bool communicates() const { return travel_ == GradientsTravel::InEveryBackward || backward_.updates; }

  // -- a backward --

  // `update`: an optimizer step follows.
  void begin(bool update);
  // Accepts a gradient of the whole parameter and returns an empty tensor. Begins a backward if none is open.
  at::Tensor take(at::Tensor grad, std::int64_t id, GradientMemory memory);
  // Contributes zeros for parameters without a gradient, reduces what is left and orders the caller after it (or leaves
  // that to settle). Does nothing when no backward is open.
  void end();
  // Sets the autograd run that the next gradient belongs to (below 0: none). If a gradient of another run has begun the
  // open backward, that run failed, and its backward is abandoned.
  void noteAutogradTask(std::int64_t task);

  // The backward that begins next may end without waiting for its reductions; settle() waits. The same on all ranks.
  void settleLater(bool later) { backward_.settles_later = later; }
  // Waits for the reductions that the last backward left running, and finishes it. All ranks call it before they begin
  // the next backward; surplus gradients (beyond the expected ones) of any rank are reduced here.
  void settle();
  // The same, called by this rank alone. Throws if any rank has surplus gradients.
  void settleAlone();
  // Discards what was accumulated for these parameters since the last update. All ranks call it, between backwards.
  void discard(const std::vector<std::int64_t>& ids);

  // -- its order --

  // Sets the planned reductions from the next backward on. The same on all ranks. See PlannedReductions.
  void plan(std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight = 2);
  // Called when the set of trainable parameters has changed: the order of gradients is learned again.
  void forgetOrder();
  // The order in which gradients enter the buckets, the same on all ranks; empty before the first backward.
  std::vector<std::int64_t> order() const;

  // -- its state --

  bool open() const { return backward_.phase == Phase::Open; }
  // True if the open backward was begun by a gradient (the plain loop) and not by begin().
  bool begunByGradient() const { return backward_.begun_by_gradient; }
  // True if the last backward has ended without waiting for its reductions, and was not settled.
  bool unsettled() const { return backward_.phase == Phase::Unsettled; }
  // Parameters that no rank had a gradient for in the last backward.
  const IdSet& withoutGradient() const { return presence_.without(); }
  // The state in words, for messages and debuggers.
  std::string describe() const;

  // -- what stages reduce with --

  void flushAll();
  void reduceToOwners(at::ScalarType dtype);
  // The reduction waits for the copies into the bucket.
  void waitForCopies();
  void divideBeforeTheSum(at::ScalarType dtype);
  ReduceOp op() const { return dividesBucket() ? ReduceOp::Sum : ReduceOp::Average; }
  // Forgets the tasks and swaps the buckets.
  void cleanUp(at::ScalarType dtype);
  void flush(at::ScalarType dtype) { stage_.flush(dtype); }

  // Ordered, so that all ranks flush the dtypes in one order.
  std::map<at::ScalarType, std::vector<ReduceTask>>& tasks() { return tasks_; }
  const bool& updates() const { return backward_.updates; }
  const Parts& parts() const { return parts_; }

 private:
  struct Backward {
    Phase phase = Phase::Closed;
    bool updates = true;             // an optimizer step follows
    bool begun_by_gradient = false;  // and not by begin()
    bool settles_later = false;
    bool had_surplus = false;  // some rank had surplus gradients: then every backward waits for its reductions
    bool reduces_tasks_as_they_lie = false;
    std::int64_t autograd_task = -1;
    std::vector<std::int64_t> newly_accumulated = {};
  };

  bool dividesBucket() const { return parts_.divides_before_the_sum && !parts_.comm->averageDividesFirst(); }
  const DSParam& param(std::int64_t id) const { return parts_.registry->getParam(id); }
  const std::string& place() const { return parts_.context->place; }
  bool alone() const { return parts_.comm->size() == 1; }

  void abandon();
  // While a backward is open on this thread, its gradients are allocated where reductions can read them in place.
  void placeGradients();
  void checkGradient(const DSParam& param, const at::Tensor& grad) const;
  const at::Tensor& emptyLike(const at::Tensor& grad);
  // The next gradients of the order; flushes where a planned bucket ends.
  void enterInOrder(const std::vector<ArrivedGradient>& arrived);
  void enter(const ArrivedGradient& arrived);
  void enterAlone(const DSParam& param, const at::Tensor& grad, bool for_good);
  void copyIntoBucket(const DSParam& param, const at::Tensor& grad, ReduceBucket& bucket);
  // True if the gradient can be reduced from its own memory, without a copy into the bucket.
  bool travelsAsItIs(const DSParam& param, const at::Tensor& grad) const;
  // Applies the accumulation rule: returns whether to add to the gradient buffer (else overwrite it).
  bool noteAccumulation(const DSParam& param);

  // True if the backward that ends need not wait for its reductions. Must be the same on all ranks, since all of them
  // exchange surplus gradients at the same point.
  bool mayLeaveRunning() const;
  void reduceSurplus();
  bool anySurplus(bool mine);
  void learnOrder();
  void finishSettling();

  const Parts parts_;
  const Stage stage_;
  GradientsTravel travel_ = GradientsTravel::InEveryBackward;
  Backward backward_;
  GradientOrder order_;
  GradientPresence presence_;
  LocalGradients local_;
  std::map<at::ScalarType, std::vector<ReduceTask>> tasks_;
  // Shared by all graphs of the runtime: parameters to whose gradient buffer the next reduction adds.
  IdSet& accumulated_;
  GradientsInFlight copied_;                                               // being copied into a bucket
  GradientsInFlight reduced_from_;                                         // reduced from where they lie
  std::shared_ptr<const std::unordered_set<std::size_t>> gradient_bytes_;  // the sizes of gradients that travel
  std::map<at::ScalarType, at::Tensor> empty_;                             // what take returns
};

}  // namespace dc
