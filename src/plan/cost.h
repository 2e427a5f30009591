// How long collectives and copies take on a machine with a given number of ranks: from measured
// points where there are some, else from the links.
#pragma once

#include "deepcompile/plan/machine.h"

namespace dc::plan {

class CostModel {
 public:
  CostModel(const Machine& machine, int world);

  // One collective over `bytes` of gathered data (reduced gradient), with nothing else on the
  // links.
  Nanos gather(Bytes bytes) const { return collective(machine_.gather, bytes); }
  Nanos reduce(Bytes bytes) const { return collective(machine_.reduce, bytes); }
  Nanos toDevice(Bytes bytes) const { return copy(machine_.to_device, bytes); }
  Nanos toHost(Bytes bytes) const { return copy(machine_.to_host, bytes); }

  // No way of splitting `bytes` into collectives takes less in total.
  Nanos leastGather(Bytes bytes) const { return leastCollective(machine_.gather, bytes); }
  Nanos leastReduce(Bytes bytes) const { return leastCollective(machine_.reduce, bytes); }

  // The smallest size that reaches 0.9 of the best bandwidth: larger buckets only cost memory and
  // delay.
  Bytes saturatingGather() const { return saturating_gather_; }
  Bytes saturatingReduce() const { return saturating_reduce_; }

  const Machine& machine() const { return machine_; }

 private:
  Nanos collective(const std::vector<Point>& points, Bytes bytes) const;
  Nanos leastCollective(const std::vector<Point>& points, Bytes bytes) const;
  Bytes saturating(const std::vector<Point>& points) const;
  static Nanos copy(const Link& link, Bytes bytes);

  Machine machine_;
  Nanos latency_ = 0;  // of the analytic collective; its bytes take bytes * share_ / divisor_ nanoseconds more
  std::int64_t share_ = 0;
  std::int64_t divisor_ = 1;
  Bytes saturating_gather_ = 0;
  Bytes saturating_reduce_ = 0;
};

}  // namespace dc::plan
