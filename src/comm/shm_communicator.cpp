#include "deepcompile/comm/shm_communicator.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "deepcompile/base/environment.h"
#include "deepcompile/base/error.h"
#include "deepcompile/base/log.h"
#include "deepcompile/comm/shared_placement.h"
#include "deepcompile/comm/shared_tensor.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/joined_memory.h"

namespace dc {
namespace {

// A process may have about 65,000 mappings; most are left to others.
constexpr std::int64_t kMostMappings = 16384;

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(std::shared_ptr<shm::Group> group, std::shared_ptr<Traffic> traffic)
      : Communicator(group->rank(), group->size(), std::move(traffic)), group_(std::move(group)) {}

  bool spins() const override { return true; }

  // In the heap that the peers read: what lies there is not staged.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    if (!options.device().is_cpu()) {
      return Communicator::empty(sizes, options);
    }
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

  void trim() override { trimShared(); }
  void placeTensors(std::shared_ptr<const std::unordered_set<std::size_t>> sizes) override {
    placeShared(in_place_ ? std::move(sizes) : nullptr);
  }
  // Where nothing is placed nothing is gained by a copy either.
  bool travelsAsItLies(const at::Tensor& tensor) const override { return !in_place_ || isShared(tensor); }
  bool takesSeparateTensors() const override { return true; }

  // Sums of 16-bit types are taken in fp32, and halves and quarters are exact: the order makes no difference.
  bool averageDividesFirst() const override { return std::has_single_bit(static_cast<unsigned>(size())); }

  bool joinsShards() const override { return in_place_; }
  std::vector<std::shared_ptr<std::byte>> joinShards(std::span<const at::Tensor> shards) override {
    const std::vector<std::vector<std::int64_t>> offsets = exchangeOffsets(shards);
    std::vector<std::shared_ptr<std::byte>> joined(shards.size());
    std::string failed;
    std::int64_t mappings = 0;
    for (std::size_t i = 0; i < shards.size() && failed.empty(); ++i) {
      const bool everywhere = std::all_of(offsets.begin(), offsets.end(), [&](const auto& of) { return of[i] >= 0; });
      if (!everywhere || mappings + size() > kMostMappings) {
        continue;
      }
      std::vector<shm::SharedPiece> pieces;
      for (int r = 0; r < size(); ++r) {
        pieces.push_back({group_->heapOf(r) + offsets[static_cast<std::size_t>(r)][i], bytesOf(shards[i])});
      }
      try {
        // The group maps the peers' heaps, and the pages outlive it.
        const auto memory = std::make_shared<shm::JoinedMemory>(pieces);
        joined[i] = std::shared_ptr<std::byte>(memory, memory->data());
        mappings += size();
      } catch (const Error& error) {
        failed = error.what();
      }
    }
    for (const std::string& other : exchangeAny(failed)) {
      if (!other.empty()) {
        log(LogLevel::Warning, concat("rank ", rank(), ": parameters are copied to be gathered: ", other));
        return std::vector<std::shared_ptr<std::byte>>(shards.size());
      }
    }
    return joined;
  }

  // What one rank gives up the others cannot go on with either.
  void abort() override { group_->poison(concat("rank ", rank(), " has aborted the group '", group_->name(), "'")); }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override { doTaggedAllGather(parts, 0); }

  void doTaggedAllGather(std::span<const GatherPart> parts, std::uint64_t tag) override {
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
    shm::allGather(group(), shards, table_, tag);
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
  // Where every rank's shards lie in its heap, by rank; below 0 for those that cannot be mapped a second time.
  std::vector<std::vector<std::int64_t>> exchangeOffsets(std::span<const at::Tensor> shards) {
    std::vector<std::int64_t> mine;
    for (const at::Tensor& shard : shards) {
      const std::int64_t offset = group_->heap().offsetOf(shard.const_data_ptr(), bytesOf(shard));
      mine.push_back(shm::JoinedMemory::wholePages(offset, bytesOf(shard)) ? offset : -1);
    }
    std::vector<std::vector<std::int64_t>> all;
    for (const std::string& other :
         exchange(std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(std::int64_t)))) {
      std::vector<std::int64_t>& offsets = all.emplace_back(shards.size());
      if (!other.empty()) {
        std::memcpy(offsets.data(), other.data(), other.size());
      }
    }
    return all;
  }

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
  const bool in_place_ = Environment::read().read_in_place != "off";
  std::atomic<bool> said_full_{false};
  shm::RunTable table_;  // kept for their memory: one operation at a time
  std::vector<shm::Run> runs_;
};

}  // namespace

std::shared_ptr<Communicator> makeShmCommunicator(std::shared_ptr<shm::Group> group, std::shared_ptr<Traffic> traffic) {
  return std::make_shared<ShmCommunicator>(std::move(group), std::move(traffic));
}

}  // namespace dc
