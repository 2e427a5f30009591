#include "deepcompile/runtime/reduction_order.h"

#include <unordered_set>
#include <utility>

namespace dc {

void ReductionOrder::expect(std::vector<std::int64_t> expected) {
  expected_ = std::move(expected);
  positions_.clear();
  for (std::size_t position = 0; position < expected_.size(); ++position) {
    positions_[expected_[position]].push_back(position);
  }
  begin();
}

void ReductionOrder::begin() {
  seen_.clear();
  waiting_.assign(expected_.size(), at::Tensor());
  next_ = 0;
  surplus_.clear();
  arrivals_.clear();
}

bool ReductionOrder::goesNow(std::int64_t id) const {
  const auto places = positions_.find(id);
  if (places == positions_.end()) {
    return false;
  }
  const auto seen = seen_.find(id);
  const std::size_t count = seen == seen_.end() ? 0 : seen->second;
  return count < places->second.size() && places->second[count] == next_;
}

void ReductionOrder::arrive(std::int64_t id, at::Tensor grad, std::vector<ArrivedGradient>& ready) {
  arrivals_.push_back(id);
  const auto places = positions_.find(id);
  const std::size_t count = seen_[id]++;
  if (places == positions_.end() || count >= places->second.size()) {
    surplus_.push_back({id, std::move(grad)});
    return;
  }
  const std::size_t position = places->second[count];
  if (position != next_) {
    waiting_[position] = std::move(grad);
    return;
  }
  ready.push_back({id, std::move(grad)});
  ++next_;
  while (next_ < expected_.size() && waiting_[next_].defined()) {
    ready.push_back({expected_[next_], std::exchange(waiting_[next_], at::Tensor())});
    ++next_;
  }
}

void ReductionOrder::finish(std::vector<ArrivedGradient>& ready) {
  for (; next_ < expected_.size(); ++next_) {
    ready.push_back({expected_[next_], std::exchange(waiting_[next_], at::Tensor())});
  }
}

std::vector<std::int64_t> ReductionOrder::learn(const std::vector<std::int64_t>& arrivals,
                                                const std::vector<std::int64_t>& all) {
  std::vector<std::int64_t> order = arrivals;
  const std::unordered_set<std::int64_t> seen(arrivals.begin(), arrivals.end());
  for (const std::int64_t id : all) {
    if (seen.find(id) == seen.end()) {
      order.push_back(id);
    }
  }
  return order;
}

}  // namespace dc
