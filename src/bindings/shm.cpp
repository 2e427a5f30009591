// Shared memory: the backend of torch.distributed and tensors.
#include <variant>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/base/environment.h"
#include "deepcompile/bindings/bindings.h"
#include "deepcompile/comm/inference_group.h"
#include "deepcompile/comm/shared_tensor.h"
#include "deepcompile/comm/shm_backend.h"
#include "deepcompile/comm/shm_rendezvous.h"

namespace dc {
namespace {

namespace py = pybind11;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

c10::intrusive_ptr<c10d::Backend> makeBackend(StorePtr store, int rank, int size, std::chrono::milliseconds timeout,
                                              const std::string& name, const std::vector<std::uint64_t>& global_ranks) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("shm", timeout);
  options->group_name = name;
  options->global_ranks_in_group = global_ranks;
  return c10::make_intrusive<ShmBackend>(std::move(store), rank, size, std::move(options));
}

// A channel of the runtime; the reason where the ranks do not share a host.
std::variant<std::shared_ptr<shm::Group>, std::string> openGroup(const StorePtr& store, int rank, int size,
                                                                 std::chrono::milliseconds timeout,
                                                                 const std::string& name,
                                                                 const std::optional<std::int64_t>& slot_bytes,
                                                                 const shm::Group* like) {
  shm::GroupOptions options;
  options.name = name;
  options.timeout = timeout;
  options.slot_bytes = slot_bytes.value_or(options.slot_bytes);
  if (like != nullptr) {
    options.tuning = like->tuning();
  }
  StoreRendezvous rendezvous(store, rank);
  std::string reason;
  if (auto group = shm::Group::open(rendezvous, rank, size, options, reason)) {
    return std::shared_ptr<shm::Group>(std::move(group));
  }
  return reason;
}

}  // namespace

void bindShm(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("make_shm_backend", &makeBackend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("name"), py::arg("global_ranks"), NoGil());
  module.def("close_shm_backends", &closeShmBackends, py::arg("grace"), NoGil());
  py::class_<shm::Group, std::shared_ptr<shm::Group>>(module, "ShmGroup")
      .def_property_readonly("rank", &shm::Group::rank)
      .def_property_readonly("size", &shm::Group::size);
  module.def("open_shm_group", &openGroup, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("name"), py::kw_only(), py::arg("slot_bytes") = py::none(), py::arg("like") = py::none(), NoGil(),
             "The group, or why there is none. `like` is a group whose thresholds this one takes over unmeasured.");
  module.def("communicator_choice", [] { return Environment::read().communicator; });
  module.def(
      "empty_shared",
      [](const std::vector<std::int64_t>& sizes, at::ScalarType dtype) { return emptyShared(sizes, dtype); },
      py::arg("sizes"), py::arg("dtype"), NoGil());
  module.def("is_shared", &isShared, py::arg("tensor"), NoGil());
  module.def("trim_shared", &trimShared, NoGil());
  module.def(
      "set_inference_group",
      [](StorePtr store, int rank, int size, std::chrono::milliseconds timeout,
         const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& process_group) {
        setInferenceGroup(
            std::make_unique<InferenceGroup>(std::move(store), rank, size, timeout, process_group.value_or(nullptr)));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("process_group"), NoGil());
  module.def("reset_inference_group", [] { setInferenceGroup(nullptr); }, NoGil());
  module.def(
      "inference_ranks_apart",
      []() -> std::optional<std::string> {
        const InferenceCall call;
        return call.group() != nullptr && call.group()->memory() == nullptr ? std::optional(call.group()->apart())
                                                                            : std::nullopt;
      },
      "Which ranks do not share a host; None where all do.");
}

}  // namespace dc
