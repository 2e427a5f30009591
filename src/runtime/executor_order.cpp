// The order in which an executor's gradients enter the buckets, where the plan flushes them, and what came beyond it.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/executor.h"

namespace dc {

void CustomOpExecutor::enterInOrder(const std::vector<ArrivedGradient>& arrived) {
  for (const ArrivedGradient& one : arrived) {
    enter(one);
    if (!flush_after_.empty() && flush_after_.count(entered_) > 0) {
      flushAllReduceBuckets();
    }
    ++entered_;
  }
}

bool CustomOpExecutor::anySurplus(bool mine) {
  if (context_->device_order) {
    // Reading what the others said would stop the host in every backward. So here gradients beyond the expected ones
    // must come on all ranks alike; a rank that has them alone waits for the others in vain, until the deadline, and
    // the others' gradients are spoiled (spoilIncomplete) so that they are not taken for whole.
    return mine;
  }
  if (last_presence_ != nullptr) {
    return (*last_presence_)[last_presence_->numel() - 1].item<double>() > 0;
  }
  bool any = false;
  for (const std::string& other : comm_->exchange(std::string(1, mine ? 'y' : 'n'))) {
    any = any || other == "y";
  }
  return any;
}

// Gradients beyond those that all ranks expect: some ranks may have them and others not. That there are any at all was
// said with the last bucket; only then do the ranks tell each other which. The reduce stream is idle.
void CustomOpExecutor::reduceSurplus() {
  std::vector<ArrivedGradient> surplus = order_->takeSurplus();
  if (!anySurplus(!surplus.empty())) {
    return;
  }
  had_surplus_ = true;
  std::vector<std::int64_t> mine;
  std::map<std::int64_t, std::vector<at::Tensor>> gradients;
  for (ArrivedGradient& arrived : surplus) {
    mine.push_back(arrived.id);
    gradients[arrived.id].push_back(std::move(arrived.grad));
  }
  std::map<std::int64_t, std::size_t> most;
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(std::int64_t));
  for (const std::string& other : comm_->exchangeAny(bytes)) {
    std::map<std::int64_t, std::size_t> counts;
    for (std::size_t i = 0; i < other.size(); i += sizeof(std::int64_t)) {
      std::int64_t id = 0;
      std::memcpy(&id, other.data() + i, sizeof(id));
      most[id] = std::max(most[id], ++counts[id]);
    }
  }
  for (const auto& [id, count] : most) {
    std::vector<at::Tensor>& own = gradients[id];
    own.resize(count);
    for (at::Tensor& gradient : own) {
      enter({id, std::move(gradient)});
    }
  }
  flushAllReduceBuckets();
  context_->await(rs_stream_->record());
}

void CustomOpExecutor::readPresence() {
  for (const Presence& presence : presence_) {
    const at::Tensor counts = presence.counts->to(at::kCPU, at::kDouble);
    const double* values = counts.const_data_ptr<double>();
    for (std::size_t i = 0; i < presence.ids.size(); ++i) {
      if (values[i] > 0) {
        present_.insert(presence.ids[i]);
      }
    }
  }
  for (const Presence& presence : presence_) {
    for (const std::int64_t id : presence.ids) {
      if (!present_.contains(id)) {
        without_gradient_.insert(id);
      }
    }
  }
  presence_.clear();
}

// Once: all ranks adopt the order that rank 0 saw, so that from now on gradients need not be parked.
void CustomOpExecutor::learnOrder() {
  std::string mine;  // only rank 0's matters
  if (comm_->rank() == 0) {
    const auto order = ReductionOrder::learn(order_->arrivals(), order_->expected());
    mine.assign(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(std::int64_t));
  }
  const std::string agreed = comm_->exchangeAny(mine)[0];  // the reduce stream is idle: endBackward has waited for it
  std::vector<std::int64_t> order(agreed.size() / sizeof(std::int64_t));
  if (!order.empty()) {  // a graph with nothing trainable
    std::memcpy(order.data(), agreed.data(), agreed.size());
  }
  order_->expect(std::move(order));
  order_learned_ = true;
  had_surplus_ = false;  // in the first backward: a parameter that is read twice
  placeFlushes();
}

void CustomOpExecutor::planReductions(std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight) {
  check(!backward_open_, [&] { return concat("reductions are planned in the middle of a backward (", place(), ")"); });
  check(in_flight >= 1, [&] { return concat("a plan of reductions lets none of them be under way (", place(), ")"); });
  reductions_in_flight_ = in_flight;
  planned_size_ = 0;
  for (const auto& bucket : buckets) {
    std::int64_t size = 0;
    for (const std::int64_t id : bucket) {
      size += member(id).getPaddedNumel();
    }
    planned_size_ = std::max(planned_size_, size);
  }
  planned_buckets_ = std::move(buckets);
  placeFlushes();
}

void CustomOpExecutor::planFlushes(std::vector<bool> after) {
  check(!backward_open_ || after.empty(),
        [&] { return concat("reductions cannot be planned anew during a backward (", place(), ")"); });
  check(after.empty() || after.size() == reductionOrder().size(), [&] {
    return concat("a plan of ", after.size(), " reductions does not fit an order of ", reductionOrder().size(), " (",
                  place(), ")");
  });
  placeFlushes();
  if (after.empty()) {
    return;
  }
  flush_after_.clear();
  for (std::size_t i = 0; i + 1 < after.size(); ++i) {  // what is left at the end is flushed there
    if (after[i]) {
      flush_after_.insert(i);
    }
  }
}

void CustomOpExecutor::forgetOrder() {
  check(!backward_open_ || implicit_,
        [&] { return concat("what is trainable changes in the middle of a backward (", place(), ")"); });
  abandonBackward();  // of the plain loop: it ended in an error
  order_.reset();
  order_learned_ = false;
  gradient_bytes_.reset();
}

void CustomOpExecutor::placeFlushes() {
  flush_after_.clear();
  if (!order_) {
    return;  // placed when it is made
  }
  std::unordered_map<std::int64_t, std::size_t> last;
  for (std::size_t i = 0; i < order_->expected().size(); ++i) {
    last[order_->expected()[i]] = i;
  }
  for (const auto& bucket : planned_buckets_) {
    std::optional<std::size_t> end;
    for (const std::int64_t id : bucket) {
      if (const auto found = last.find(id); found != last.end()) {
        end = std::max(end.value_or(0), found->second);
      }
    }
    // The last one is left to the end of the backward, which knows whether gradients came beyond the expected ones.
    if (end && *end + 1 < order_->expected().size()) {
      flush_after_.insert(*end);
    }
  }
}

}  // namespace dc
