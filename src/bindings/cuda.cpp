// The module deepcompile._cuda: loading it makes our CUDA kernels those of the runtime.
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/comm/channel.h"
#include "deepcompile/comm/nccl_api.h"
#include "deepcompile/comm/nccl_communicator.h"
#include "deepcompile/comm/rank_sum_kernels_cuda.h"
#include "deepcompile/comm/symmetric_communicator.h"
#include "deepcompile/comm/symmetric_reductions.h"
#include "deepcompile/runtime/register_kernels_cuda.h"

namespace dc {
namespace {

namespace py = pybind11;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

class NcclChannel final : public Channel {
 public:
  NcclChannel(StorePtr store, int rank, int size, int device, double timeout, bool registered)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        device_(device),
        timeout_(timeout),
        registered_(registered) {}

  std::shared_ptr<Communicator> open(std::shared_ptr<Traffic> traffic) const override {
    return makeNcclCommunicator(store_, rank_, size_, device_, timeout_, std::move(traffic), registered_);
  }

 private:
  const StorePtr store_;
  const int rank_;
  const int size_;
  const int device_;
  const double timeout_;
  const bool registered_;
};

class SymmetricChannel final : public Channel {
 public:
  // For gathers, or for reductions.
  SymmetricChannel(StorePtr store, std::string group, int rank, int size, int device, double timeout, bool reduces)
      : store_(std::move(store)),
        group_(std::move(group)),
        rank_(rank),
        size_(size),
        device_(device),
        timeout_(timeout),
        reduces_(reduces) {}

  std::shared_ptr<Communicator> open(std::shared_ptr<Traffic> traffic) const override {
    if (reduces_ && size_ > cuda::kMostSummedRanks) {
      return makeNcclCommunicator(store_, rank_, size_, device_, timeout_, std::move(traffic));
    }
    // What passes through `rest` is counted by the communicator around it.
    auto rest = makeNcclCommunicator(store_, rank_, size_, device_, timeout_, std::make_shared<Traffic>());
    if (reduces_) {
      return makeSymmetricReductions(group_, std::move(rest), device_, timeout_, std::move(traffic));
    }
    auto heap = std::make_shared<SymmetricHeap>(group_, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_)));
    return makeSymmetricCommunicator(std::move(heap), std::move(rest), device_, std::move(traffic));
  }

 private:
  const StorePtr store_;
  const std::string group_;
  const int rank_;
  const int size_;
  const int device_;
  const double timeout_;
  const bool reduces_;
};

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  py::module_::import("deepcompile._C");  // knows the type Channel
  cuda::registerKernels();
  module.def(
      "nccl_channel",
      [](StorePtr store, int rank, int size, int device, double timeout, bool registered) -> std::shared_ptr<Channel> {
        return std::make_shared<NcclChannel>(std::move(store), rank, size, device, timeout, registered);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("timeout"), py::arg("registered"),
      "Opened by the runtime that it is given to, which is a collective.");
  module.def(
      "symmetric_channel",
      [](StorePtr store, std::string group, int rank, int size, int device, double timeout,
         bool reduces) -> std::shared_ptr<Channel> {
        return std::make_shared<SymmetricChannel>(std::move(store), std::move(group), rank, size, device, timeout,
                                                  reduces);
      },
      py::arg("store"), py::arg("group"), py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("timeout"),
      py::arg("reduces"),
      "Gathers, or reductions, through symmetric memory, the rest over NCCL. `group` is the name of the process "
      "group.");
  module.def(
      "nccl_version",
      [] {
        int version = 0;
        nccl::check(nccl::Api::get().getVersion(&version), "ncclGetVersion");
        return version;
      },
      "Of the library that is used, as a number: 22809 is 2.28.9.");
}

}  // namespace dc
