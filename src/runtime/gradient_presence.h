// Which parameters had a gradient in a backward, on this rank and on any rank. See Note [Presence] in docs/runtime.md.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/ids.h"

namespace dc {

class GradientPresence {
 public:
  void begin();
  void noteGradient(std::int64_t id) { here_.insert(id); }
  bool hasGradient(std::int64_t id) const { return here_.contains(id); }
  // Notes that no rank had a gradient for this parameter.
  void noteWithout(std::int64_t id) { without_.insert(id); }

  // Notes a bucket whose reduction was started. `counts`, valid when the reduction has run: for each parameter how many
  // ranks had a gradient, and as the last element whether any rank has surplus gradients (beyond the expected ones).
  // `lacking`: this rank lacks a gradient in it.
  void noteBucket(std::vector<std::int64_t> ids, std::shared_ptr<const at::Tensor> counts, bool lacking);
  // The last buckets of the backward follow; only their report on surplus gradients counts.
  void noteEnd() { last_.reset(); }
  bool bucketsSaidOfSurplus() const { return last_ != nullptr; }
  // Whether any rank has surplus gradients, as the last bucket reported. Its reduction must have run.
  bool anySurplus() const { return (*last_)[last_->numel() - 1].item<double>() > 0; }
  // Reads the counts of the buckets in which this rank lacked a gradient. Their reductions must have run.
  void read();

  // Parameters that no rank had a gradient for in the last backward.
  const IdSet& without() const { return without_; }

 private:
  struct Bucket {
    std::vector<std::int64_t> ids;
    std::shared_ptr<const at::Tensor> counts;
  };
  IdSet here_;
  IdSet without_;
  std::vector<Bucket> lacking_;
  std::shared_ptr<const at::Tensor> last_;
};

}  // namespace dc
