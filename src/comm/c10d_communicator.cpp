#include "deepcompile/comm/c10d_communicator.h"

#include <cstring>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/ordered_sum.h"

namespace dc {
namespace {

at::Tensor asBytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

at::Tensor bytesLike(const at::Tensor& tensor, std::int64_t count) {
  return at::empty({count}, tensor.options().dtype(at::kByte).requires_grad(false));
}

// Wide enough to keep what follows aligned for every dtype.
constexpr std::int64_t kTagBytes = 16;
// Bytes of a shard from which another small collective costs less than another copy of it.
constexpr std::int64_t kWorthItsOwnCollective = 1 << 20;

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Traffic> traffic)
      : Communicator(backend->getRank(), backend->getSize(), std::move(traffic)), backend_(std::move(backend)) {}

  void abort() override { backend_->abort(); }

 protected:
  // One tensor is gathered in place; several are packed, so that the group costs one collective. Everything travels as
  // bytes: a gather does not care for the dtype, and backends differ in those they know.
  void doAllGather(std::span<const GatherPart> parts) override {
    if (parts.size() == 1) {
      gatherBytes(asBytes(parts[0].full), asBytes(parts[0].shard));
      return;
    }
    std::int64_t row = 0;
    for (const GatherPart& part : parts) {
      row += static_cast<std::int64_t>(part.shard.nbytes());
    }
    if (row == 0) {
      return;
    }
    const at::Tensor packed = bytesLike(parts[0].shard, row);
    const at::Tensor gathered = bytesLike(parts[0].shard, row * size());
    std::int64_t offset = 0;
    for (const GatherPart& part : parts) {
      const auto bytes = static_cast<std::int64_t>(part.shard.nbytes());
      packed.narrow(0, offset, bytes).copy_(asBytes(part.shard));
      offset += bytes;
    }
    gatherBytes(gathered, packed);
    const at::Tensor rows = gathered.view({size(), row});
    offset = 0;
    for (const GatherPart& part : parts) {
      const auto bytes = static_cast<std::int64_t>(part.shard.nbytes());
      asBytes(part.full).view({size(), bytes}).copy_(rows.narrow(1, offset, bytes));
      offset += bytes;
    }
  }

  // The tag is packed with the shards, or travels before a shard that is too large to be packed for its sake.
  void doTaggedAllGather(std::span<const GatherPart> parts, std::uint64_t tag) override {
    if (tag == 0 || parts.empty() || !parts[0].shard.is_cpu()) {
      doAllGather(parts);
      return;
    }
    const GatherPart tags{bytesOf(tag), at::empty({size() * kTagBytes}, at::TensorOptions().dtype(at::kByte))};
    const bool packs = parts.size() > 1 || static_cast<std::int64_t>(parts[0].shard.nbytes()) < kWorthItsOwnCollective;
    std::vector<GatherPart> together = {tags};
    if (packs) {
      together.insert(together.end(), parts.begin(), parts.end());
    }
    doAllGather(together);
    checkTags(tags.full.view({size(), kTagBytes}), tag);
    if (!packs) {
      doAllGather(parts);
    }
  }

  // All-to-all of the slices and a local sum in rank order: the bytes of a reduce-scatter for owners of any size.
  // (Gloo's own reduce-scatter moves the bytes of an all-reduce and sums in an order of its own.) Behind each slice
  // travels the tag.
  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) override {
    if (parts.empty()) {
      return;
    }
    const auto width = static_cast<std::int64_t>(parts[0].send.element_size());
    std::vector<std::int64_t> to_rank(size(), kTagBytes);
    for (const ReducePart& part : parts) {
      for (int r = 0; r < size(); ++r) {
        to_rank[r] += part.owners[r].size() * width;
      }
    }
    const at::Tensor packed =
        bytesLike(parts[0].send, std::accumulate(to_rank.begin(), to_rank.end(), std::int64_t{0}));
    std::int64_t offset = 0;
    const auto put = [&](const at::Tensor& bytes) {
      packed.narrow(0, offset, bytes.numel()).copy_(bytes);
      offset += bytes.numel();
    };
    const at::Tensor tag_bytes = bytesOf(tag);
    for (int r = 0; r < size(); ++r) {
      for (const ReducePart& part : parts) {
        put(asBytes(part.send.narrow(0, part.owners[r].begin, part.owners[r].size())));
      }
      put(tag_bytes);
    }
    const std::int64_t own = to_rank[rank()];
    const at::Tensor received = bytesLike(packed, size() * own);
    exchangeSlices(received, packed, own, to_rank);

    const at::Tensor rows = received.view({size(), own});
    checkTags(rows.narrow(1, own - kTagBytes, kTagBytes), tag);
    if (own == kTagBytes) {
      return;
    }
    const at::Tensor slices = rows.narrow(1, 0, own - kTagBytes).view(parts[0].send.scalar_type());
    const at::Tensor sum = sumInRankOrder(slices, op == ReduceOp::Average);
    offset = 0;
    for (const ReducePart& part : parts) {
      part.receive.copy_(sum.narrow(0, offset, part.receive.numel()));
      offset += part.receive.numel();
    }
  }

  void doAllReduce(const at::Tensor& tensor, ReduceOp op) override {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    options.timeout = limit();
    complete(backend_->allreduce(tensors, options));
    if (op == ReduceOp::Average) {
      tensor.div_(size());
    }
  }

  void doBroadcast(const at::Tensor& tensor, int root) override {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = limit();
    complete(backend_->broadcast(tensors, options));
  }

  void doBarrier() override {
    c10d::BarrierOptions options;
    options.timeout = limit();
    complete(backend_->barrier(options));
  }

  std::vector<std::string> doExchange(const std::string& bytes) override {
    const auto length = static_cast<std::int64_t>(bytes.size());
    const at::Tensor mine = at::empty({length}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(mine.mutable_data_ptr(), bytes.data(), bytes.size());
    const at::Tensor gathered = at::empty({size() * length}, mine.options());
    gatherBytes(gathered, mine);
    const auto* data = static_cast<const char*>(gathered.const_data_ptr());
    std::vector<std::string> all(size());
    for (int r = 0; r < size(); ++r) {
      all[r].assign(data + r * length, bytes.size());
    }
    return all;
  }

 private:
  void gatherBytes(at::Tensor full, at::Tensor shard) {
    if (shard.numel() == 0) {
      return;
    }
    c10d::AllgatherOptions options;
    options.timeout = limit();
    complete(backend_->_allgather_base(full, shard, options));
  }

  // Rank r gets `to_rank[r]` bytes of `packed`; `own` bytes come from every rank.
  void exchangeSlices(at::Tensor received, at::Tensor packed, std::int64_t own, std::vector<std::int64_t> to_rank) {
    std::vector<std::int64_t> from_rank(size(), own);
    c10d::AllToAllOptions options;
    options.timeout = limit();
    complete(backend_->alltoall_base(received, packed, from_rank, to_rank, options));
  }

  static at::Tensor bytesOf(std::uint64_t tag) {
    at::Tensor bytes = at::zeros({kTagBytes}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(bytes.mutable_data_ptr(), &tag, sizeof(tag));
    return bytes;
  }

  void checkTags(const at::Tensor& rows, std::uint64_t tag) const {
    const at::Tensor tags = rows.to(at::kCPU).contiguous();
    for (int r = 0; r < size(); ++r) {
      std::uint64_t other = 0;
      std::memcpy(&other, static_cast<const char*>(tags.const_data_ptr()) + r * kTagBytes, sizeof(other));
      check(other == tag, [&] {
        return concat("rank ", r, " gathers or reduces other parameters than rank ", rank(),
                      " at this point; debug mode says which");
      });
    }
  }

  std::chrono::milliseconds limit() const {
    return std::chrono::milliseconds(static_cast<std::int64_t>(timeout() * 1000));
  }

  // The backend's own timeout ends the operation; waiting a little longer leaves it the time to say why.
  void complete(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work != nullptr) {
      work->wait(limit() + std::chrono::seconds(5));
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

std::shared_ptr<Communicator> makeC10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend,
                                                   std::shared_ptr<Traffic> traffic) {
  return std::make_shared<C10dCommunicator>(std::move(backend), std::move(traffic));
}

}  // namespace dc
