#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/communicator_over.h"
#include "deepcompile/comm/copy_kernels_cuda.h"
#include "deepcompile/comm/symmetric_communicator.h"

namespace dc {
namespace {

class SymmetricCommunicator final : public CommunicatorOver {
 public:
  SymmetricCommunicator(std::shared_ptr<SymmetricHeap> heap, std::shared_ptr<Communicator> rest, int device,
                        std::shared_ptr<Traffic> traffic)
      : CommunicatorOver(std::move(rest), std::move(traffic)),
        heap_(std::move(heap)),
        device_(static_cast<c10::DeviceIndex>(device)) {}

  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return heap_->empty(sizes, c10::typeMetaToScalarType(options.dtype()));
  }

  bool readsPeers() const override { return true; }
  void endReads() override {
    holdReads(false);
    if (barrier_block_) {
      meet(*barrier_block_);
    }
  }
  void holdReads(bool hold) override {
    held_ = hold;
    met_ = false;
  }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override {
    const c10::cuda::CUDAGuard guard(device_);
    std::vector<SymmetricHeap::Place> places;
    for (const GatherPart& part : parts) {
      const auto place = heap_->find(part.shard.const_data_ptr());
      if (!place || part.shard.nbytes() % kWord != 0) {
        rest().allGather(parts);  // all of them alike: sizes and places are the same on every rank
        return;
      }
      places.push_back(*place);
    }
    agreeOn(places, parts);
    if (!barrier_block_) {
      barrier_block_ = places[0].block;
    }
    if (!held_ || !met_) {
      meet(*barrier_block_);  // every rank has written what is read now
      met_ = true;
    }
    pull(parts, places);
  }

 private:
  static constexpr std::size_t kWord = 16;
  static constexpr int kChannel = 0;

  void meet(std::size_t block) { heap_->shared(block).barrier(kChannel, static_cast<std::size_t>(timeout() * 1000)); }

  // Reading a peer's memory at a place that is not the shard there would be wrong in silence. So each set of places is
  // compared once; a rank whose shard has moved asks alone, and ends at the deadline.
  void agreeOn(const std::vector<SymmetricHeap::Place>& places, std::span<const GatherPart> parts) {
    std::string mine;
    for (std::size_t i = 0; i < places.size(); ++i) {
      mine += concat(places[i].block, ":", places[i].offset, "+", parts[i].shard.nbytes(), ";");
    }
    if (!agreed_.insert(mine).second) {
      return;
    }
    for (const auto& place : places) {
      heap_->shared(place.block);
    }
    const std::vector<std::string> all = rest().exchangeAny(mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      check(all[r] == mine, [&] {
        return concat("shards lie at other places of the symmetric memory on rank ", r, " than on rank ", rank(),
                      ": were parameters sharded in another order there?");
      });
    }
  }

  void pull(std::span<const GatherPart> parts, const std::vector<SymmetricHeap::Place>& places) {
    std::vector<cuda::Piece> pieces;
    pieces.reserve(parts.size() * static_cast<std::size_t>(size()));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::vector<void*> blocks = heap_->shared(places[i].block).get_buffer_ptrs();
      const std::size_t bytes = parts[i].shard.nbytes();
      for (int step = 0; step < size(); ++step) {
        const auto r = static_cast<std::size_t>((rank() + step) % size());  // not all from the same rank at once
        pieces.push_back({static_cast<const char*>(blocks[r]) + places[i].offset,
                          static_cast<char*>(parts[i].full.mutable_data_ptr()) + r * bytes,
                          static_cast<std::int64_t>(bytes / kWord)});
      }
    }
    C10_CUDA_CHECK(cuda::movePieces(pieces.data(), static_cast<int>(pieces.size()),
                                    c10::cuda::getCurrentCUDAStream(device_).stream()));
  }

  const std::shared_ptr<SymmetricHeap> heap_;
  const c10::DeviceIndex device_;
  std::optional<std::size_t> barrier_block_;  // whose signals the barriers use: that of the first gather
  std::unordered_set<std::string> agreed_;
  bool held_ = false;
  bool met_ = false;  // since shards were held
};

}  // namespace

std::shared_ptr<Communicator> makeSymmetricCommunicator(std::shared_ptr<SymmetricHeap> heap,
                                                        std::shared_ptr<Communicator> rest, int device,
                                                        std::shared_ptr<Traffic> traffic) {
  return std::make_shared<SymmetricCommunicator>(std::move(heap), std::move(rest), device, std::move(traffic));
}

}  // namespace dc
