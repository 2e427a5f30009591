// The c10d backend `shm`: collectives of PyTorch through memory that the ranks of one host share.
//
// All ranks make the same calls in the same order. Synchronous calls run on the caller's thread, asynchronous ones in
// order on a thread of the backend. Every operation has a deadline (its own or the group's); after one has failed the
// group is poisoned and all later ones fail with the first error. Sends and receives stand outside this order.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deepcompile/comm/shm_work.h"
#include "deepcompile/shm/group.h"
#include "deepcompile/shm/point_to_point.h"

namespace dc {

class ShmBackend final : public c10d::Backend {
 public:
  using Millis = std::chrono::milliseconds;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // Collective over the store. Throws on all ranks, and says which rank is elsewhere, where they do not share a host.
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  // Waits for what is queued. Takes no part in it in a forked child, which has none of the threads.
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  void setTimeout(Millis timeout) override;
  // Runs what is queued, and leaves the group.
  void shutdown() override;
  // Makes pending operations fail, here and on the other ranks, and leaves the group.
  void abort() override;
  c10d::ErrorType getError() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void enableCollectivesTiming() override {}
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // What is asked for. `name` is as users know the call.
  struct Request {
    c10d::OpType type;
    const char* title;  // "shm:" and the name, for profilers
    Millis timeout;
    bool async;
    const char* name() const { return title + 4; }
  };
  using Body = std::function<void(shm::Group& group)>;

  WorkPtr submit(const Request& request, const Tensors& inputs, Tensors outputs, Body body);
  WorkPtr reduceAll(const Request& request, Tensors& tensors, const c10d::ReduceOp& op);
  WorkPtr gatherTables(const Request& request, std::vector<Tensors>& outputs, Tensors& inputs);
  WorkPtr gatherTensors(const Request& request, Tensors& outputs, Tensors& inputs);
  WorkPtr scatterReduced(const Request& request, Tensors& outputs, Tensors& inputs, const c10d::ReduceOp& op);
  WorkPtr receive(const Request& request, Tensors& tensors, int from, int tag);
  c10::intrusive_ptr<ShmWork> makeWork(const Request& request, const Tensors& inputs, Tensors outputs);
  std::shared_ptr<shm::Group> group() const;
  shm::Messenger& messenger();
  void checkRoot(const char* call, std::int64_t root) const;
  void note(const WorkPtr& work);
  void close();
  void leaveToParent();

  const c10::intrusive_ptr<Options> options_;
  const std::string name_;
  const pid_t owner_;
  std::atomic<std::int64_t> timeout_;  // milliseconds
  std::atomic<std::uint64_t> sequence_{0};

  mutable std::mutex mutex_;           // of the members below; never held while an operation runs
  std::shared_ptr<shm::Group> group_;  // none after shutdown
  std::shared_ptr<WorkQueue> queue_;
  std::unique_ptr<shm::Messenger> messenger_;  // made for the first message
  std::optional<std::vector<WorkPtr>> coalesced_;
};

// Before the interpreter ends: lets the queues of all backends run for up to `grace`, makes what is left fail, and ends
// their threads, whose callbacks could not run afterwards.
void closeShmBackends(std::chrono::milliseconds grace);

}  // namespace dc
