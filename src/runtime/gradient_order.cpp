#include "deepcompile/runtime/gradient_order.h"

#include <algorithm>
#include <unordered_map>

namespace dc {

void GradientOrder::expect(std::vector<std::int64_t> reversed) {
  order_.emplace(std::move(reversed));
  placeEnds();
}

void GradientOrder::learn(std::vector<std::int64_t> order) {
  order_->expect(std::move(order));
  learned_ = true;
  placeEnds();
}

void GradientOrder::forget() {
  order_.reset();
  learned_ = false;
}

void GradientOrder::begin() {
  if (next_) {
    planned_ = *std::exchange(next_, std::nullopt);
    placeEnds();
  }
  order_->begin();
  entered_ = 0;
}

void GradientOrder::placeEnds() {
  ends_.clear();
  if (!order_) {
    return;  // placed when the order is known
  }
  std::unordered_map<std::int64_t, std::size_t> last;
  for (std::size_t i = 0; i < order_->expected().size(); ++i) {
    last[order_->expected()[i]] = i;
  }
  for (const auto& bucket : planned_.buckets) {
    std::optional<std::size_t> end;
    for (const std::int64_t id : bucket) {
      if (const auto found = last.find(id); found != last.end()) {
        end = std::max(end.value_or(0), found->second);
      }
    }
    // The last bucket is flushed at the end of the backward, when it is known whether this rank has surplus gradients.
    if (end && *end + 1 < order_->expected().size()) {
      ends_.insert(*end);
    }
  }
}

}  // namespace dc
