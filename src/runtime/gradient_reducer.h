// Takes in the gradients of one graph, orders them, fills buckets, and reduces each bucket to the owners of its slices.
//
// The stages differ in two things: when gradients travel (GradientsTravel), and how a full bucket is reduced (Stage).
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

// Of a gradient that is handed over: whose its memory is from then on.
enum class GradientMemory : std::uint8_t {
  Borrowed,        // the caller's, who may write to it once the call has returned
  Donated,         // nobody writes to it any more
  DonatedForGood,  // and nobody reads it
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
  // What a stage does. Called by the reducer, with the lock.
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

  // -- a backward
  // ------------------------------------------------------------------------------------------------------

  // `update`: an optimizer step follows.
  void begin(bool update);
  // A gradient of the whole parameter. Returns an empty tensor. Begins a backward where none is open.
  at::Tensor take(at::Tensor grad, std::int64_t id, GradientMemory memory);
  // Contributes zeros for parameters without a gradient, reduces what is left and orders the caller after it (or leaves
  // that to settle). Does nothing when no backward is open.
  void end();
  // The autograd run that the next gradient belongs to (below 0: none). A backward that a gradient of another run had
  // begun was given up.
  void noteAutogradTask(std::int64_t task);

  // The backward that begins next may end without a wait for its reductions; settle has it. The same on all ranks.
  void settleLater(bool later) { backward_.settles_later = later; }
  // Waits for what the last backward left running and does what was to be done after it. All ranks call it before they
  // begin the next backward; gradients that some rank had beyond the expected ones are reduced here.
  void settle();
  // The same at a moment of this rank's own. Throws when there are gradients beyond the expected ones.
  void settleAlone();
  // Between backwards: what backwards since the last update have accumulated of these parameters is thrown away. All
  // ranks call it.
  void discard(const std::vector<std::int64_t>& ids);

  // -- its order
  // -------------------------------------------------------------------------------------------------------

  // From the next backward on. The same on all ranks. See PlannedReductions.
  void plan(std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight = 2);
  // What is trainable has changed: the order of the gradients is learned again.
  void forgetOrder();
  // In which gradients enter the buckets, the same on all ranks; empty before the first backward.
  std::vector<std::int64_t> order() const;

  // -- its state
  // -------------------------------------------------------------------------------------------------------

  bool open() const { return backward_.phase == Phase::Open; }
  // The open backward was begun by a gradient, as in the plain loop.
  bool begunByGradient() const { return backward_.begun_by_gradient; }
  // A backward has ended without a wait for its reductions, and was not settled.
  bool unsettled() const { return backward_.phase == Phase::Unsettled; }
  // Parameters that no rank had a gradient for in the last backward.
  const IdSet& withoutGradient() const { return presence_.without(); }
  // In words, for messages and debuggers.
  std::string describe() const;

  // -- what stages reduce with
  // -----------------------------------------------------------------------------------------

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
    bool had_surplus = false;  // some rank had gradients beyond the expected ones: then every backward is waited for
    bool reduces_tasks_as_they_lie = false;
    std::int64_t autograd_task = -1;
    std::vector<std::int64_t> newly_accumulated = {};
  };

  bool dividesBucket() const { return parts_.divides_before_the_sum && !parts_.comm->averageDividesFirst(); }
  const DSParam& param(std::int64_t id) const { return parts_.registry->getParam(id); }
  const std::string& place() const { return parts_.context->place; }
  bool alone() const { return parts_.comm->size() == 1; }

  void abandon();
  // While a backward is open on this thread its gradients are made where they travel from.
  void placeGradients();
  void checkGradient(const DSParam& param, const at::Tensor& grad) const;
  const at::Tensor& emptyLike(const at::Tensor& grad);
  // The next gradients of the order; flushes where a planned bucket ends.
  void enterInOrder(const std::vector<ArrivedGradient>& arrived);
  void enter(const ArrivedGradient& arrived);
  void enterAlone(const DSParam& param, const at::Tensor& grad, bool for_good);
  void copyIntoBucket(const DSParam& param, const at::Tensor& grad, ReduceBucket& bucket);
  // True when the gradient can be reduced from its own memory.
  bool travelsAsItIs(const DSParam& param, const at::Tensor& grad) const;
  // Adds to the gradient buffer or overwrites it, as the accumulation rule says. Returns whether to add.
  bool noteAccumulation(const DSParam& param);

  // True when the backward that ends may do so without a wait. Never depends on the rank: where gradients come beyond
  // the expected ones, all ranks meet at the same place.
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
  // Shared by all graphs of the runtime: parameters whose gradient buffer is to be added to.
  IdSet& accumulated_;
  GradientsInFlight copied_;                                               // on their way into a bucket
  GradientsInFlight reduced_from_;                                         // reduced from where they lie
  std::shared_ptr<const std::unordered_set<std::size_t>> gradient_bytes_;  // the sizes of gradients that travel
  std::map<at::ScalarType, at::Tensor> empty_;                             // what take returns
};

}  // namespace dc
