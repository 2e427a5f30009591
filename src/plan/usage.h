// What follows from a step graph before anything is planned: which nodes use which parameters, how
// long buffers live, and the memory that every plan needs. A "slot" is the index of a node in the
// graph's order.
#pragma once

#include <span>
#include <vector>

#include "deepcompile/plan/graph.h"

namespace dc::plan {

// A list of lists in two arrays.
class Lists {
 public:
  // (list, value) pairs, in the order in which the values shall stand in their lists.
  Lists() = default;
  Lists(std::size_t count, const std::vector<std::pair<Index, Index>>& pairs);
  std::span<const Index> operator[](std::size_t list) const {
    return {values_.data() + begin_[list], values_.data() + begin_[list + 1]};
  }
  std::size_t size() const { return begin_.empty() ? 0 : begin_.size() - 1; }

 private:
  std::vector<Index> begin_;
  std::vector<Index> values_;
};

struct Usage {
  explicit Usage(const StepGraph& graph);

  Lists needs;                     // slot -> parameters that must be gathered while it runs (ZeRO-3 only), ascending
  Lists uses;                      // parameter -> slots that need it, ascending
  Lists contributions;             // parameter -> slots that contribute to its gradient, ascending
  std::vector<Index> update;       // parameter -> its optimizer slot, or kNone
  std::vector<Index> buffer_made;  // buffer (no alias) -> slot, kNone for inputs
  std::vector<Index> buffer_last;  // buffer (no alias) -> last slot that reads it, or its maker
  Lists buffer_reads;              // buffer (no alias) -> slots that read it through any alias, ascending
  Bytes resident = 0;              // shards, accumulators, states and inputs
  std::vector<Bytes> live;         // slot -> resident + live buffers + workspace + gradients that the slot makes
  std::vector<Bytes> gathered;     // slot -> bytes of the parameters that it needs
};

}  // namespace dc::plan
