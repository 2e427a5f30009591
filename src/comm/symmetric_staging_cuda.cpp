#include "deepcompile/base/error.h"
#include "deepcompile/comm/symmetric_staging.h"

namespace dc {

namespace symmetric = c10d::symmetric_memory;

SymmetricStaging::SymmetricStaging(const std::string& group_name, at::Device device, std::int64_t half_bytes)
    : half_bytes_(half_bytes) {
  check(symmetric::has_allocator(device.type()), "this PyTorch has no symmetric memory for CUDA");
  memory_ = symmetric::empty_strided_p2p({2 * half_bytes}, {1}, at::kByte, device, group_name, std::nullopt);
  shared_ = symmetric::rendezvous(memory_, group_name);
  check(shared_ != nullptr, "the ranks cannot read each other's memory; set symmetric_memory to false");
  check(shared_->get_world_size() <= cuda::kMostSummedRanks, [&] {
    return concat(shared_->get_world_size(), " ranks are more than can share memory (", cuda::kMostSummedRanks, ")");
  });
}

char* SymmetricStaging::half() const {
  return static_cast<char*>(memory_.mutable_data_ptr()) + (second_ ? half_bytes_ : 0);
}

cuda::RankBases SymmetricStaging::halves() const {
  cuda::RankBases bases{};
  bases.ranks = shared_->get_world_size();
  bases.mine = shared_->get_rank();
  const std::vector<void*> blocks = shared_->get_buffer_ptrs();
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    bases.of_rank[r] = static_cast<const char*>(blocks[r]) + (second_ ? half_bytes_ : 0);
  }
  return bases;
}

void SymmetricStaging::meet(double timeout_seconds) {
  constexpr int kChannel = 0;
  shared_->barrier(kChannel, static_cast<std::size_t>(timeout_seconds * 1000));
}

}  // namespace dc
