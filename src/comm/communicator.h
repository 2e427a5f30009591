// Collectives as the runtime needs them. One communicator is one ordered channel: all ranks call the same operations in
// the same order. Calls return when the operation is complete on CPU, or enqueued on the current stream of a device.
//
// Gathers and reductions use two communicators, so that neither queues behind the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/comm/traffic.h"

namespace dc {

enum class ReduceOp { Sum, Average };

// One parameter of a grouped all-gather: `full` holds the ranks' shards one after the other. Flat and contiguous.
struct GatherPart {
  at::Tensor shard;
  at::Tensor full;
};

// Elements [begin, end) of a flattened tensor.
struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// One tensor of a grouped reduction to owners. Rank r owns the elements owners[r] of `send`; what this rank owns
// arrives in `receive`. Slices may be uneven, empty and in any order. Flat and contiguous; `receive` may not overlap
// `send`. The sum is taken in rank order, in fp32 for 16-bit types and rounded once, so the result does not depend on
// how tensors are grouped and is the same bits everywhere.
struct ReducePart {
  at::Tensor send;
  std::vector<Slice> owners;
  at::Tensor receive;
};

class Communicator {
 public:
  // `traffic` counts what passes; shared with whoever reports it.
  Communicator(int rank, int size, std::shared_ptr<Traffic> traffic);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Seconds that one operation may take. Read at each call; may be changed between calls.
  void setTimeout(double seconds) { timeout_seconds_ = seconds; }
  double timeout() const { return timeout_seconds_; }

  // `tag` says what is being gathered or reduced; ranks that come with different ones are an error on all of them where
  // the sizes let it be noticed.
  void allGather(std::span<const GatherPart> parts, std::uint64_t tag = 0);
  void reduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag = 0);
  void allReduce(const at::Tensor& tensor, ReduceOp op);
  void broadcast(const at::Tensor& tensor, int root);
  void barrier();

  // Every rank's bytes, by rank. For control messages: may block the host. All ranks give the same number of bytes.
  std::vector<std::string> exchange(const std::string& bytes);
  // The same for any number of bytes, as two exchanges.
  std::vector<std::string> exchangeAny(const std::string& bytes);

  // True when a rank that waits for others keeps its core busy; false when it sleeps in the kernel.
  virtual bool spins() const { return false; }

  // Uninitialised, contiguous memory for a tensor that travels: where this communicator moves it with the fewest
  // copies. Tensors from elsewhere travel as well. Where such memory has run out it is ordinary memory, which is said
  // once.
  virtual at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Gives such memory that lies idle back to the system.
  virtual void trim() {}
  // Tensors of these sizes that the calling thread makes from now on (null: none) lie there, as far as it is possible,
  // whoever makes them.
  virtual void placeTensors(std::shared_ptr<const std::unordered_set<std::size_t>> sizes_in_bytes) {}
  // True when `tensor` lies where nothing has to be copied before the peers can read it.
  virtual bool travelsAsItLies(const at::Tensor& tensor) const { return false; }
  // True when many separate tensors are reduced as fast as the same elements in one piece, so that nothing is gained by
  // packing them first.
  virtual bool takesSeparateTensors() const { return false; }

  // Where results of gathers should lie, and stay; null: anywhere. Lives as long as the communicator.
  virtual c10::Allocator* memoryOfGathers() { return nullptr; }

  // True when the shard of a gather may lie in its own place of the result.
  virtual bool gathersInPlace() const { return false; }

  // True when ReduceOp::Average divides before it adds, at no cost: no overflow in 16 bits.
  virtual bool averageDividesFirst() const { return false; }

  // True when gathers read the peers' shards in place: before a shard is changed all ranks call endReads(), which
  // orders the change after everybody's reads.
  virtual bool readsPeers() const { return false; }
  virtual void endReads() {}
  // True: no rank changes a shard until endReads(), so gathers that read them in place need to meet only once. Again in
  // every forward: the next gather then meets again. The same on all ranks.
  virtual void holdReads(bool hold) {}

  // False where joinShards never gives memory.
  virtual bool joinsShards() const { return false; }
  // For each of these shards the memory of all ranks' shards, rank after rank, as if gathered: the shards themselves
  // under other addresses, so that it changes as they do. Null for shards that cannot be had so. All ranks call it with
  // as many shards of the same sizes, and get memory for the same ones.
  virtual std::vector<std::shared_ptr<std::byte>> joinShards(std::span<const at::Tensor> shards) {
    return std::vector<std::shared_ptr<std::byte>>(shards.size());
  }

  // What the communicator has noticed by itself: an error of an operation that was enqueued on a device.
  virtual std::optional<std::string> brokenBy() { return std::nullopt; }

  // Makes pending and later operations of this rank fail soon. For teardown after an error.
  virtual void abort() = 0;

 protected:
  virtual void doAllGather(std::span<const GatherPart> parts) = 0;
  virtual void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) = 0;
  virtual void doAllReduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual void doBroadcast(const at::Tensor& tensor, int root) = 0;
  virtual void doBarrier() = 0;
  virtual std::vector<std::string> doExchange(const std::string& bytes) = 0;
  // Where a tag can travel with a gather.
  virtual void doTaggedAllGather(std::span<const GatherPart> parts, std::uint64_t tag) { doAllGather(parts); }

 private:
  const int rank_;
  const int size_;
  std::atomic<double> timeout_seconds_{300};
  const std::shared_ptr<Traffic> traffic_;
};

}  // namespace dc
