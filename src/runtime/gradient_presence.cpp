#include "deepcompile/runtime/gradient_presence.h"

namespace dc {

void GradientPresence::begin() {
  here_.clear();
  without_.clear();
  lacking_.clear();
}

void GradientPresence::noteBucket(std::vector<std::int64_t> ids, std::shared_ptr<const at::Tensor> counts,
                                  bool lacking) {
  last_ = counts;
  if (lacking) {
    lacking_.push_back({std::move(ids), std::move(counts)});
  }
}

void GradientPresence::read() {
  for (const Bucket& bucket : lacking_) {
    const at::Tensor counts = bucket.counts->to(at::kCPU, at::kDouble);
    const double* values = counts.const_data_ptr<double>();
    for (std::size_t i = 0; i < bucket.ids.size(); ++i) {
      if (values[i] > 0) {
        here_.insert(bucket.ids[i]);
      }
    }
  }
  for (const Bucket& bucket : lacking_) {
    for (const std::int64_t id : bucket.ids) {
      if (!here_.contains(id)) {
        without_.insert(id);
      }
    }
  }
  lacking_.clear();
}

}  // namespace dc
