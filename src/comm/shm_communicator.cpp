#include "deepcompile/comm/shm_communicator.h"

#include <atomic>
#include <bit>
#include <chrono>
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/base/log.h"
#include "deepcompile/comm/shared_tensor.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(std::shared_ptr<shm::Group> group, std::shared_ptr<Traffic> traffic)
      : Communicator(group->rank(), group->size(), std::move(traffic)), group_(std::move(group)) {}

  bool spins() const override { return true; }

  // In the heap that the peers read: what lies there is not staged.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    try {
      return emptyShared(sizes, c10::typeMetaToScalarType(options.dtype()));
    } catch (const Error& error) {
      if (!said_full_.exchange(true)) {
        log(LogLevel::Warning, concat("rank ", rank(), ": tensors that travel go to ordinary memory and are staged, ",
                                      "which is slower: ", error.what()));
      }
      return Communicator::empty(sizes, options);
    }
  }

  bool takesSeparateTensors() const override { return true; }

  // Sums of 16-bit types are taken in fp32, and halves and quarters are exact: the order makes no difference.
  bool averageDividesFirst() const override { return std::has_single_bit(static_cast<unsigned>(size())); }

  // What one rank gives up the others cannot go on with either.
  void abort() override { group_->poison(concat("rank ", rank(), " has aborted the group '", group_->name(), "'")); }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override {
    std::vector<shm::Run>& shards = runs_;
    shards.clear();
    for (const GatherPart& part : parts) {
      shards.push_back(runOf(part.shard));
    }
    table_.clear();
    for (int r = 0; r < size(); ++r) {
      for (const GatherPart& part : parts) {
        const std::int64_t bytes = bytesOf(part.shard);
        table_.add(dataOf(part.full) + r * bytes, bytes);
      }
      table_.endRank();
    }
    shm::allGather(group(), shards, table_);
  }

  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) override {
    if (parts.empty()) {
      return;
    }
    const at::Tensor& first = parts[0].send;
    const auto width = static_cast<std::int64_t>(first.element_size());
    table_.clear();
    for (int r = 0; r < size(); ++r) {
      for (const ReducePart& part : parts) {
        const Slice& slice = part.owners[static_cast<std::size_t>(r)];
        table_.add(dataOf(part.send) + slice.begin * width, slice.size() * width);
      }
      table_.endRank();
    }
    runs_.clear();
    for (const ReducePart& part : parts) {
      runs_.push_back(runOf(part.receive));
    }
    const Reduction how = reduction(first, op);
    shm::reduceScatter(group(), table_, runs_, how.dtype, how.op, tag);
  }

  void doAllReduce(const at::Tensor& tensor, ReduceOp op) override {
    std::byte* data = dataOf(tensor);
    const Reduction how = reduction(tensor, op);
    shm::allReduce(group(), data, data, tensor.numel() * how.factor, how.dtype, how.op);
  }

  void doBroadcast(const at::Tensor& tensor, int root) override {
    const shm::Run data = runOf(tensor);
    shm::broadcast(group(), {&data, 1}, root);
  }

  void doBarrier() override { shm::barrier(group()); }

  std::vector<std::string> doExchange(const std::string& bytes) override {
    const auto length = static_cast<std::int64_t>(bytes.size());
    std::vector<std::string> all(static_cast<std::size_t>(size()), std::string(bytes.size(), '\0'));
    table_.clear();
    for (std::string& other : all) {
      table_.add(other.data(), length);
      table_.endRank();
    }
    const shm::Run mine = shm::run(bytes.data(), length);
    shm::allGather(group(), {&mine, 1}, table_);
    return all;
  }

 private:
  // With the deadline of now.
  shm::Group& group() {
    group_->setTimeout(std::chrono::milliseconds(static_cast<std::int64_t>(timeout() * 1000)));
    return *group_;
  }

  static std::byte* dataOf(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }
  static Reduction reduction(const at::Tensor& tensor, ReduceOp op) {
    return reductionOf(tensor.scalar_type(), op == ReduceOp::Average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM,
                       "a reduction");
  }

  const std::shared_ptr<shm::Group> group_;
  std::atomic<bool> said_full_{false};
  shm::RunTable table_;  // kept for their memory: one operation at a time
  std::vector<shm::Run> runs_;
};

}  // namespace

std::shared_ptr<Communicator> makeShmCommunicator(std::shared_ptr<shm::Group> group, std::shared_ptr<Traffic> traffic) {
  return std::make_shared<ShmCommunicator>(std::move(group), std::move(traffic));
}

}  // namespace dc
