// The order in which gradients enter the buckets: fixed for all ranks, whatever order they arrive in.
//
// A bucket's contents must be the same on every rank, but ranks may route differently and lack a gradient, or finish
// two in another order. So there is an expected order; a gradient that arrives early is parked until those before it
// are there, and at the end of the backward the missing ones go in as "no gradient". The first backward expects the
// reverse of the forward order; afterwards all ranks adopt the order that rank 0 saw (repeats included), so that in a
// plain model nothing is ever parked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dc {

struct ArrivedGradient {
  std::int64_t id = 0;
  at::Tensor grad;        // undefined: this rank has none
  bool given = true;      // donated: no other code writes to its memory any more
  bool for_good = false;  // and no other code reads it
};

class ReductionOrder {
 public:
  explicit ReductionOrder(std::vector<std::int64_t> expected) { expect(std::move(expected)); }

  // From the next begin() on. Ids may repeat: several gradients of one parameter in one backward.
  void expect(std::vector<std::int64_t> expected);
  const std::vector<std::int64_t>& expected() const { return expected_; }

  void begin();
  // True if a gradient of `id` that arrives now may enter its bucket at once; else it would be parked.
  bool goesNow(std::int64_t id) const;
  // Appends to `ready` what may now enter the buckets, in order. What is parked is kept as it is given: the caller
  // copies it if its memory may change. An id beyond its expected count goes to the surplus.
  void arrive(std::int64_t id, at::Tensor grad, std::vector<ArrivedGradient>& ready);
  // Appends the parked and missing ones, in the expected order.
  void finish(std::vector<ArrivedGradient>& ready);
  // Surplus gradients: those beyond the expected counts, in order of arrival. Other ranks may have others.
  bool hasSurplus() const { return !surplus_.empty(); }
  std::vector<ArrivedGradient> takeSurplus() { return std::exchange(surplus_, {}); }

  // The ids in the order of their arrival since begin().
  const std::vector<std::int64_t>& arrivals() const { return arrivals_; }
  // What rank 0 saw, followed by the ids of `all` that it did not see: the order for later backwards.
  static std::vector<std::int64_t> learn(const std::vector<std::int64_t>& arrivals,
                                         const std::vector<std::int64_t>& all);

 private:
  std::vector<std::int64_t> expected_;
  std::unordered_map<std::int64_t, std::vector<std::size_t>> positions_;  // of each id in expected_
  std::unordered_map<std::int64_t, std::size_t> seen_;                    // how often each id has arrived
  std::vector<at::Tensor> waiting_;                                       // by position; undefined: not arrived
  std::size_t next_ = 0;                                                  // first position that has not gone in
  std::vector<ArrivedGradient> surplus_;
  std::vector<std::int64_t> arrivals_;
};

}  // namespace dc
