// The order in which a graph's gradients enter the buckets, the same on all ranks, and where in it buckets are reduced.
//
// The first backward expects the reverse of the forward order; afterwards all ranks adopt the order that rank 0 saw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "deepcompile/runtime/reduction_order.h"

namespace dc {

// Which gradients are reduced together: those of each list as soon as its last one has come; all others by the bucket
// size.
struct PlannedReductions {
  std::vector<std::vector<std::int64_t>> buckets = {};
  std::size_t in_flight = 2;  // most reductions that hold gradients at once; for a further one the caller waits
  std::int64_t largest = 0;   // elements of a bucket
};

class GradientOrder {
 public:
  bool known() const { return order_.has_value(); }
  // `reversed`: the trainable parameters, the last one first.
  void expect(std::vector<std::int64_t> reversed);
  bool learned() const { return learned_; }
  // What all ranks adopt from the next backward on.
  void learn(std::vector<std::int64_t> order);
  // Called when the set of trainable parameters has changed.
  void forget();
  ReductionOrder& arrivals() { return *order_; }
  const ReductionOrder& arrivals() const { return *order_; }

  // From the next begin() on.
  void plan(PlannedReductions planned) { next_ = std::move(planned); }
  const PlannedReductions& planned() const { return planned_; }

  // A backward begins.
  void begin();
  // The next gradient of the order has entered its bucket. True when a planned bucket ends with it.
  bool entered() { return !ends_.empty() && ends_.count(entered_++) > 0; }

 private:
  void placeEnds();

  std::optional<ReductionOrder> order_;
  bool learned_ = false;
  PlannedReductions planned_;
  std::optional<PlannedReductions> next_;
  std::unordered_set<std::size_t> ends_;  // of planned buckets, as positions in the order
  std::size_t entered_ = 0;               // in this backward; counted where there are ends
};

}  // namespace dc
