#include "deepcompile/comm/ordered_sum.h"

#include <cstdint>

namespace dc {

at::Tensor sumInRankOrder(const at::Tensor& rows, bool average) {
  const bool half = rows.scalar_type() == at::kHalf || rows.scalar_type() == at::kBFloat16;
  at::Tensor sum = half ? rows[0].to(at::kFloat) : rows[0];
  for (std::int64_t rank = 1; rank < rows.size(0); ++rank) {
    sum.add_(rows[rank]);
  }
  if (average) {
    sum.div_(rows.size(0));
  }
  return half ? sum.to(rows.scalar_type()) : sum;
}

}  // namespace dc
