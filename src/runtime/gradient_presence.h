// Which parameters had a gradient in a backward: on this rank, and on any. See Note [Presence] in docs/runtime.md.
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
  // No rank had one.
  void noteWithout(std::int64_t id) { without_.insert(id); }

  // A bucket is on its way. `counts`: there when its reduction has run; of each parameter the ranks that had a
  // gradient, and last whether any rank has gradients beyond the expected ones. `lacking`: this rank lacks a gradient
  // in it.
  void noteBucket(std::vector<std::int64_t> ids, std::shared_ptr<const at::Tensor> counts, bool lacking);
  // The backward's last buckets follow: what they say of surpluses counts.
  void noteEnd() { last_.reset(); }
  bool bucketsSaidOfSurplus() const { return last_ != nullptr; }
  // What the bucket that came last said. Its reduction has run.
  bool anySurplus() const { return (*last_)[last_->numel() - 1].item<double>() > 0; }
  // Reads what the buckets said, where this rank lacked a gradient. Their reductions have run.
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
