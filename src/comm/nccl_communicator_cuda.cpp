#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/nccl_api.h"
#include "deepcompile/comm/nccl_communicator.h"
#include "deepcompile/comm/nccl_memory.h"

namespace dc {
namespace {

using nccl::Api;

// Puts what is called between its birth and end() into one launch.
class Grouped {
 public:
  Grouped() { nccl::check(Api::get().groupStart(), "ncclGroupStart"); }
  ~Grouped() {
    if (open_) {
      Api::get().groupEnd();  // an exception is on its way already
    }
  }
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;
  void end() {
    open_ = false;
    nccl::check(Api::get().groupEnd(), "ncclGroupEnd");
  }

 private:
  bool open_ = true;
};

// True when the ranks own equal parts one after the other, which is what a reduce-scatter does.
bool even(const ReducePart& part) {
  const std::int64_t size = part.owners[0].size();
  for (std::size_t r = 0; r < part.owners.size(); ++r) {
    if (part.owners[r].begin != static_cast<std::int64_t>(r) * size || part.owners[r].size() != size) {
      return false;
    }
  }
  return true;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(nccl::Comm* comm, int rank, int size, int device, std::shared_ptr<Traffic> traffic, bool registered)
      : Communicator(rank, size, std::move(traffic)), device_(static_cast<c10::DeviceIndex>(device)), comm_(comm) {
    if (registered) {
      memory_ = std::make_shared<NcclMemory>(comm, device_);
    }
  }

  ~NcclCommunicator() override {
    if (nccl::Comm* comm = comm_.exchange(nullptr); comm != nullptr) {
      closeMemory(/*orderly=*/true);
      Api::get().commDestroy(comm);
    }
  }

  bool gathersInPlace() const override { return true; }
  bool averageDividesFirst() const override { return true; }
  bool takesSeparateTensors() const override { return true; }  // grouped calls are one launch
  bool travelsAsItLies(const at::Tensor&) const override { return true; }

  c10::Allocator* memoryOfGathers() override { return memory_.get(); }

  std::optional<std::string> brokenBy() override {
    const std::lock_guard lock(mutex_);
    nccl::Comm* const comm = comm_.load();
    int result = 0;
    if (comm == nullptr || Api::get().commGetAsyncError(comm, &result) != 0 || result == 0 || result == 7) {
      return std::nullopt;
    }
    return concat("NCCL reports ", Api::get().getErrorString(result), " (", Api::get().getLastError(comm), ")");
  }

  void abort() override {
    const std::lock_guard lock(mutex_);
    if (nccl::Comm* comm = comm_.exchange(nullptr); comm != nullptr) {
      closeMemory(/*orderly=*/false);
      Api::get().commAbort(comm);
    }
  }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override {
    const c10::cuda::CUDAGuard device(device_);
    nccl::Comm* const comm = open();
    const nccl::Stream stream = current();
    Grouped group;
    for (const GatherPart& part : parts) {
      if (part.shard.nbytes() > 0) {
        nccl::check(Api::get().allGather(part.shard.const_data_ptr(), part.full.mutable_data_ptr(), part.shard.nbytes(),
                                         static_cast<int>(nccl::DataType::Int8), comm, stream),
                    "ncclAllGather");
      }
    }
    group.end();
  }

  // The tag cannot travel without stopping the host; `debug` compares what the ranks mean.
  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t) override {
    const c10::cuda::CUDAGuard device(device_);
    nccl::Comm* const comm = open();
    const nccl::Stream stream = current();
    Grouped group;
    for (const ReducePart& part : parts) {
      const nccl::Travel travel = nccl::travelType(part.send.scalar_type());
      const int type = static_cast<int>(travel.type);
      const auto count = [&](const Slice& slice) { return static_cast<std::size_t>(slice.size() * travel.factor); };
      if (even(part)) {
        if (part.owners[0].size() > 0) {
          nccl::check(Api::get().reduceScatter(part.send.const_data_ptr(), part.receive.mutable_data_ptr(),
                                               count(part.owners[0]), type, redOp(op), comm, stream),
                      "ncclReduceScatter");
        }
        continue;
      }
      for (int r = 0; r < size(); ++r) {
        const Slice& slice = part.owners[static_cast<std::size_t>(r)];
        if (slice.size() == 0) {
          continue;
        }
        const char* const send = static_cast<const char*>(part.send.const_data_ptr()) +
                                 slice.begin * static_cast<std::int64_t>(part.send.element_size());
        void* const receive = r == rank() ? part.receive.mutable_data_ptr() : nullptr;
        nccl::check(Api::get().reduce(send, receive, count(slice), type, redOp(op), r, comm, stream), "ncclReduce");
      }
    }
    group.end();
  }

  void doAllReduce(const at::Tensor& tensor, ReduceOp op) override {
    const c10::cuda::CUDAGuard device(device_);
    const nccl::Travel travel = nccl::travelType(tensor.scalar_type());
    nccl::check(Api::get().allReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                                     static_cast<std::size_t>(tensor.numel() * travel.factor),
                                     static_cast<int>(travel.type), redOp(op), open(), current()),
                "ncclAllReduce");
  }

  void doBroadcast(const at::Tensor& tensor, int root) override {
    const c10::cuda::CUDAGuard device(device_);
    nccl::check(Api::get().broadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(),
                                     static_cast<int>(nccl::DataType::Int8), root, open(), current()),
                "ncclBroadcast");
  }

  void doBarrier() override { doExchange("b"); }

  std::vector<std::string> doExchange(const std::string& bytes) override {
    const c10::cuda::CUDAGuard device(device_);
    const auto length = static_cast<std::int64_t>(bytes.size());
    std::vector<std::string> all(static_cast<std::size_t>(size()));
    if (length == 0) {
      return all;
    }
    const auto on_device = at::TensorOptions().dtype(at::kByte).device(at::Device(at::kCUDA, device_));
    const at::Tensor host = at::empty({size() * length}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
    const at::Tensor mine = at::empty({length}, on_device);
    const at::Tensor gathered = at::empty({size() * length}, on_device);
    mine.copy_(host.narrow(0, 0, length), /*non_blocking=*/true);
    const GatherPart part{mine, gathered};
    doAllGather({&part, 1});
    host.copy_(gathered, /*non_blocking=*/true);
    awaitStream();
    const auto* data = static_cast<const char*>(host.const_data_ptr());
    for (int r = 0; r < size(); ++r) {
      all[static_cast<std::size_t>(r)].assign(data + r * length, bytes.size());
    }
    return all;
  }

 private:
  static int redOp(ReduceOp op) {
    return static_cast<int>(op == ReduceOp::Average ? nccl::RedOp::Avg : nccl::RedOp::Sum);
  }

  void closeMemory(bool orderly) {
    if (memory_ != nullptr) {
      memory_->close(orderly);
    }
  }

  nccl::Stream current() const { return c10::cuda::getCurrentCUDAStream(device_).stream(); }

  nccl::Comm* open() const {
    nccl::Comm* const comm = comm_.load();
    check(comm != nullptr, [&] {
      return concat("the NCCL communicator of rank ", rank(), " of ", size(), " was aborted after an error");
    });
    return comm;
  }

  // Blocks the host, with a deadline: only for control messages.
  void awaitStream() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout());
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device_);
    while (!stream.query()) {
      if (auto broken = brokenBy()) {
        abort();
        fail(*broken);
      }
      if (std::chrono::steady_clock::now() > deadline) {
        abort();
        fail("NCCL: the ranks did not all take part in an exchange within ", timeout(), " seconds");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  const c10::DeviceIndex device_;
  std::mutex mutex_;  // abort() against brokenBy(), which the watchdog calls
  std::atomic<nccl::Comm*> comm_;
  std::shared_ptr<NcclMemory> memory_;  // null: gathers go to any memory
};

}  // namespace

std::shared_ptr<Communicator> makeNcclCommunicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   int device, double timeout, std::shared_ptr<Traffic> traffic,
                                                   bool registered) {
  check(!registered || Api::get().canRegister(), [] {
    int version = 0;
    Api::get().getVersion(&version);
    return concat("registered_memory needs NCCL 2.19 or later, and this is ", version,
                  "; leave the key out or set it to false");
  });
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const auto limit = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000));
  nccl::UniqueId id{};
  if (rank == 0) {
    nccl::check(Api::get().getUniqueId(&id), "ncclGetUniqueId");
    store->set("id", std::vector<std::uint8_t>(id.bytes, id.bytes + sizeof(id.bytes)));
  }
  // NCCL's own set-up waits for ever, so all ranks say that they are here first.
  store->set(concat("here/", rank), std::vector<std::uint8_t>{1});
  std::vector<std::string> keys = {"id"};
  for (int r = 0; r < size; ++r) {
    keys.push_back(concat("here/", r));
  }
  try {
    store->wait(keys, limit);
  } catch (const std::exception& error) {
    std::string missing;
    for (int r = 0; r < size; ++r) {
      if (!store->check({concat("here/", r)})) {
        missing += concat(missing.empty() ? "" : ", ", r);
      }
    }
    fail("setting up NCCL on rank ", rank, " of ", size, ": ranks [", missing, "] did not come within ", timeout,
         " seconds (", error.what(), ")");
  }
  const std::vector<std::uint8_t> received = store->get("id");
  check(received.size() == sizeof(id.bytes), "setting up NCCL: the id from rank 0 has a wrong length");
  std::memcpy(id.bytes, received.data(), sizeof(id.bytes));
  nccl::Comm* comm = nullptr;
  nccl::check(Api::get().commInitRank(&comm, size, id, rank), "ncclCommInitRank");
  return std::make_shared<NcclCommunicator>(comm, rank, size, device, std::move(traffic), registered);
}

}  // namespace dc
