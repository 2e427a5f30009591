#include "deepcompile/comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"

namespace dc {

Communicator::Communicator(int rank, int size, std::shared_ptr<Traffic> traffic)
    : rank_(rank), size_(size), traffic_(std::move(traffic)) {
  check(size >= 1 && rank >= 0 && rank < size,
        [&] { return concat("communicator: rank ", rank, " of ", size, " does not exist"); });
}

at::Tensor Communicator::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

void Communicator::allGather(std::span<const GatherPart> parts, std::uint64_t tag) {
  std::int64_t sent = 0;
  for (const GatherPart& part : parts) {
    check(part.full.numel() == part.shard.numel() * size_ && part.full.dtype() == part.shard.dtype(), [&] {
      return concat("all-gather: ", part.full.numel(), " elements of ", part.full.dtype().name(), " cannot hold ",
                    size_, " shards of ", part.shard.numel(), " elements of ", part.shard.dtype().name());
    });
    sent += static_cast<std::int64_t>(part.shard.nbytes()) * (size_ - 1);
  }
  doTaggedAllGather(parts, tag);
  traffic_->count(Collective::AllGather, sent);
}

void Communicator::reduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) {
  std::int64_t sent = 0;
  for (const ReducePart& part : parts) {
    check(part.owners.size() == static_cast<std::size_t>(size_),
          [&] { return concat("reduce-scatter: ", part.owners.size(), " owners for ", size_, " ranks"); });
    const std::int64_t own = part.owners[rank_].size();
    for (const Slice& slice : part.owners) {
      check(0 <= slice.begin && slice.begin <= slice.end && slice.end <= part.send.numel(), [&] {
        return concat("reduce-scatter: elements [", slice.begin, ", ", slice.end, ") of ", part.send.numel());
      });
      sent += slice.size() * static_cast<std::int64_t>(part.send.element_size());
    }
    check(part.receive.numel() == own && part.receive.dtype() == part.send.dtype(), [&] {
      return concat("reduce-scatter: rank ", rank_, " owns ", own, " elements of ", part.send.dtype().name(),
                    " and has room for ", part.receive.numel(), " of ", part.receive.dtype().name());
    });
    sent -= own * static_cast<std::int64_t>(part.send.element_size());
  }
  doReduceScatter(parts, op, tag);
  traffic_->count(Collective::ReduceScatter, sent);
}

void Communicator::allReduce(const at::Tensor& tensor, ReduceOp op) {
  doAllReduce(tensor, op);
  traffic_->count(Collective::AllReduce, 2 * static_cast<std::int64_t>(tensor.nbytes()) * (size_ - 1) / size_);
}

void Communicator::broadcast(const at::Tensor& tensor, int root) {
  check(root >= 0 && root < size_,
        [&] { return concat("broadcast: root ", root, " does not exist among ", size_, " ranks"); });
  doBroadcast(tensor, root);
  traffic_->count(Collective::Broadcast, rank_ == root ? static_cast<std::int64_t>(tensor.nbytes()) * (size_ - 1) : 0);
}

void Communicator::barrier() {
  doBarrier();
  traffic_->count(Collective::Barrier, 0);
}

std::vector<std::string> Communicator::exchange(const std::string& bytes) {
  auto all = doExchange(bytes);
  traffic_->count(Collective::Exchange, static_cast<std::int64_t>(bytes.size()) * (size_ - 1));
  return all;
}

std::vector<std::string> Communicator::exchangeAny(const std::string& bytes) {
  const std::uint64_t length = bytes.size();
  std::uint64_t longest = 0;
  std::vector<std::uint64_t> lengths;
  for (const std::string& other : exchange(std::string(reinterpret_cast<const char*>(&length), sizeof(length)))) {
    std::memcpy(&lengths.emplace_back(), other.data(), sizeof(length));
    longest = std::max(longest, lengths.back());
  }
  std::string padded = bytes;
  padded.resize(longest);
  auto all = exchange(padded);
  for (std::size_t r = 0; r < all.size(); ++r) {
    all[r].resize(lengths[r]);
  }
  return all;
}

}  // namespace dc
