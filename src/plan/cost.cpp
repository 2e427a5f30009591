#include "deepcompile/plan/cost.h"

#include <algorithm>

#include "deepcompile/base/error.h"

namespace dc::plan {
namespace {

constexpr Nanos kSecond = 1000000000;
constexpr int kEfficiency = 900;  // thousandths of the best bandwidth at which a collective counts as saturated

}  // namespace

CostModel::CostModel(const Machine& machine, int world) : machine_(machine) {
  check(world >= 1, [&] { return concat("a cost model needs at least one rank, not ", world); });
  // A ring over all ranks: each rank receives (n-1)/n of the data over the inside link, and each
  // node (m-1)/m of it over the links of all its ranks together. The slower of the two decides.
  const std::int64_t inside = std::min(world, machine.devices);
  const std::int64_t nodes = (world + machine.devices - 1) / machine.devices;
  latency_ = machine.inside.latency * (inside - 1) + machine.between.latency * (nodes - 1);
  // Nanoseconds per byte as a fraction: kSecond * (n-1) / (n * bandwidth). Both are compared by
  // cross products.
  const std::int64_t ring = nodes > 1 ? world : inside;
  const Wide inside_share = static_cast<Wide>(kSecond) * (ring - 1);
  const Wide inside_divisor = static_cast<Wide>(ring) * machine.inside.bandwidth;
  const Wide between_share = static_cast<Wide>(kSecond) * (nodes - 1);
  const Wide between_divisor = static_cast<Wide>(nodes) * inside * machine.between.bandwidth;
  const bool inside_decides = inside_share * between_divisor >= between_share * inside_divisor;
  share_ = static_cast<std::int64_t>(inside_decides ? inside_share : between_share);
  divisor_ = static_cast<std::int64_t>(inside_decides ? inside_divisor : between_divisor);
  saturating_gather_ = saturating(machine_.gather);
  saturating_reduce_ = saturating(machine_.reduce);
}

Nanos CostModel::collective(const std::vector<Point>& points, Bytes bytes) const {
  if (bytes == 0) {
    return 0;
  }
  if (points.empty()) {
    return latency_ + mulDivUp(bytes, share_, divisor_);
  }
  // Linear between the points; below the first one its time, above the last one its bandwidth (or
  // the last slope if that is slower).
  const auto above = std::lower_bound(points.begin(), points.end(), bytes,
                                      [](const Point& point, Bytes size) { return point.bytes < size; });
  if (above == points.begin()) {
    return points.front().time;
  }
  if (above == points.end()) {
    return mulDivUp(bytes, points.back().time, points.back().bytes);
  }
  const Point& low = *(above - 1);
  return low.time + mulDivUp(bytes - low.bytes, above->time - low.time, above->bytes - low.bytes);
}

Nanos CostModel::leastCollective(const std::vector<Point>& points, Bytes bytes) const {
  if (bytes == 0) {
    return 0;
  }
  if (points.empty()) {
    return latency_ + mulDiv(bytes, share_, divisor_);
  }
  // A piecewise linear curve has its least time per byte at one of its points.
  Point best = points.front();
  for (const Point& point : points) {
    if (static_cast<Wide>(point.time) * best.bytes < static_cast<Wide>(best.time) * point.bytes) {
      best = point;
    }
  }
  return std::max(points.front().time, mulDiv(bytes, best.time, best.bytes));
}

Bytes CostModel::saturating(const std::vector<Point>& points) const {
  // Sizes in steps of an eighth of a power of two.
  for (Bytes base = 1 << 6; base < Bytes{1} << 34; base *= 2) {
    for (Bytes size = base; size < 2 * base; size += base / 8) {
      // The least time of a huge transfer, per size: latency does not count.
      const Nanos ideal = points.empty() ? mulDiv(size, share_, divisor_)
                                         : mulDiv(leastCollective(points, Bytes{1} << 44), size, Bytes{1} << 44);
      if (static_cast<Wide>(ideal) * 1000 >= static_cast<Wide>(collective(points, size)) * kEfficiency) {
        return size;
      }
    }
  }
  return Bytes{1} << 34;
}

Nanos CostModel::copy(const Link& link, Bytes bytes) {
  return bytes == 0 ? 0 : link.latency + mulDivUp(bytes, kSecond, link.bandwidth);
}

}  // namespace dc::plan
