// Device memory of a fixed size that every rank can read, in two halves that take turns.
//
// A turn: write what the peers need into half(), meet(), read what they wrote, turn(). A half is written again two
// turns later: whoever has met in between has read it. All of it on one stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "deepcompile/comm/rank_sum_kernels_cuda.h"

namespace dc {

class SymmetricStaging {
 public:
  // A collective. `group_name` is that of a process group of torch.distributed, through whose store the ranks meet.
  SymmetricStaging(const std::string& group_name, at::Device device, std::int64_t half_bytes);

  std::int64_t bytes() const { return half_bytes_; }
  char* half() const;
  // Every rank's half of this turn.
  cuda::RankBases halves() const;
  // Enqueues a barrier of all ranks, which ends at the deadline, and the process's use of the device with it.
  void meet(double timeout_seconds);
  void turn() { second_ = !second_; }

 private:
  const std::int64_t half_bytes_;
  at::Tensor memory_;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> shared_;
  bool second_ = false;
};

}  // namespace dc
