// Device memory that every rank can read: pieces of large blocks which the ranks have made known to each other.
//
// All ranks take the same sizes in the same order, so a piece lies at the same place on each of them. Blocks are given
// back when the last tensor of theirs is gone; pieces are not used again before.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

namespace dc {

class SymmetricHeap {
 public:
  // `group_name` is that of a process group of torch.distributed, through whose store the ranks meet.
  SymmetricHeap(std::string group_name, at::Device device);

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // Where a piece lies: the same numbers on all ranks.
  struct Place {
    std::size_t block = 0;
    std::int64_t offset = 0;
  };
  // Nothing for memory that is not the heap's.
  std::optional<Place> find(const void* memory) const;

  // The block as the ranks see it. The first call for a block is a collective.
  c10d::symmetric_memory::SymmetricMemory& shared(std::size_t block);

 private:
  struct Block {
    at::Tensor memory;
    std::int64_t used = 0;
    c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> shared = {};  // null until the first gather from it
  };
  static constexpr std::int64_t kBlockBytes = std::int64_t{256} << 20;
  static constexpr std::int64_t kAlignment = 256;

  const std::string name_;
  const at::Device device_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace dc
