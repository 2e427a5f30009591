// The runtime and its default instance.
#include "deepcompile/runtime/runtime.h"

#include <variant>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/bindings/bindings.h"
#include "deepcompile/comm/c10d_communicator.h"
#include "deepcompile/comm/channel.h"
#include "deepcompile/comm/roll_call.h"
#include "deepcompile/comm/shm_communicator.h"
#include "deepcompile/runtime/device_kernels.h"
#include "deepcompile/runtime/parameter_misuse.h"

namespace dc {
namespace {

namespace py = pybind11;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using AnyChannel = std::variant<std::shared_ptr<shm::Group>, std::shared_ptr<Channel>, BackendPtr>;

std::shared_ptr<Communicator> communicatorOf(const AnyChannel& channel, const std::shared_ptr<Traffic>& traffic) {
  if (const auto* shared = std::get_if<std::shared_ptr<shm::Group>>(&channel)) {
    return makeShmCommunicator(*shared, traffic);
  }
  if (const auto* opened_here = std::get_if<std::shared_ptr<Channel>>(&channel)) {
    return (*opened_here)->open(traffic);
  }
  return makeC10dCommunicator(std::get<BackendPtr>(channel), traffic);
}

// Channels are the same object where one has to serve several purposes.
std::shared_ptr<Runtime> makeRuntime(const GroupPtr& group, const Config& config, std::int64_t bucket_size,
                                     const AnyChannel& gather, const AnyChannel& reduce, const AnyChannel& control,
                                     int local_ranks, at::Device device, const StorePtr& store) {
  const py::gil_scoped_release others_may_run;  // opening a channel waits for other ranks
  auto context = std::make_shared<Context>(config, group->getRank(), group->getSize());
  Channels channels;
  channels.gather = communicatorOf(gather, context->traffic);
  channels.reduce = gather == reduce ? channels.gather : communicatorOf(reduce, context->traffic);
  channels.control = gather == control ? channels.gather : communicatorOf(control, context->traffic);
  // Destroying a process group joins its threads, and those may need the interpreter to let go of what they captured:
  // so the runtime is destroyed without it, wherever the last reference goes.
  return std::shared_ptr<Runtime>(new Runtime(group, std::move(context), std::move(channels), bucket_size, local_ranks,
                                              device, makeRollCall(store, group->getRank(), group->getSize())),
                                  [](Runtime* runtime) {
                                    if (PyGILState_Check() != 0) {
                                      const py::gil_scoped_release no_gil;
                                      delete runtime;
                                    } else {
                                      delete runtime;
                                    }
                                  });
}

ParamOptions paramOptions(const std::string& name, const std::optional<at::ScalarType>& reduce_dtype) {
  return {name, reduce_dtype};
}

// Of stats(), alone: an engine asks for it twice a step.
double waitSeconds(Runtime& runtime) {
  return static_cast<double>(runtime.context().stats.wait_nanoseconds.load()) * 1e-9;
}

py::dict statsOf(Runtime& runtime) {
  const Stats& stats = runtime.context().stats;
  const Traffic& traffic = *runtime.context().traffic;
  py::dict calls;
  py::dict bytes;
  for (std::size_t kind = 0; kind < kCollectiveNames.size(); ++kind) {
    const py::str name(kCollectiveNames[kind].data(), kCollectiveNames[kind].size());
    calls[name] = traffic.calls(static_cast<Collective>(kind));
    bytes[name] = traffic.bytes(static_cast<Collective>(kind));
  }
  BufferPool& pool = runtime.pool();
  py::dict all;
  all["rank"] = runtime.context().rank;
  all["world_size"] = runtime.context().size;
  all["shared_memory"] = runtime.channels().gather->spins();
  all["device"] = runtime.device().str();
  all["cpu_stream"] = runtime.streamMode() == CpuStreamMode::Worker ? "worker" : "inline";
  all["parameters"] = runtime.parameterCount();
  all["collectives"] = calls;
  all["bytes_sent"] = bytes;
  all["gathers_launched"] = stats.gathers_launched.load();
  all["gathers_fused"] = stats.gathers_fused.load();
  all["gathers_reused"] = stats.gathers_reused.load();
  all["gathers_in_place"] = stats.gathers_in_place.load();
  all["gathers_in_backward"] = stats.gathers_in_backward.load();
  all["releases"] = stats.releases.load();
  all["gathered_bytes_live"] = pool.live();
  all["gathered_bytes_peak"] = pool.peak();
  all["buffers_taken"] = pool.taken();
  all["buffers_reused"] = pool.reused();
  all["buffer_bytes_idle"] = pool.idle();
  all["bucket_bytes"] = runtime.reduceBuckets()->bytes();
  all["gradients_reduced"] = stats.gradients_reduced.load();
  all["gradients_missing"] = stats.gradients_missing.load();
  all["gradients_parked"] = stats.gradients_parked.load();
  all["gradients_in_place"] = stats.gradients_in_place.load();
  all["buckets_flushed"] = stats.buckets_flushed.load();
  all["backwards_left_running"] = stats.backwards_left_running.load();
  all["activations_freed"] = stats.activations_freed.load();
  all["bytes_offloaded"] = stats.bytes_offloaded.load();
  all["bytes_reloaded"] = stats.bytes_reloaded.load();
  all["waits"] = stats.waits.load();
  all["wait_seconds"] = waitSeconds(runtime);
  return all;
}

void bindConfig(py::module_& module) {
  py::class_<Config>(module, "Config")
      .def(py::init<>())
      .def_readwrite("symmetric_memory", &Config::symmetric_memory)
      .def_readwrite("registered_memory", &Config::registered_memory)
      .def_readwrite("double_buffer", &Config::double_buffer)
      .def_readwrite("free_activation_threshold", &Config::free_activation_threshold)
      .def_readwrite("offload_limit", &Config::offload_limit)
      .def_readwrite("sync_before_reduce", &Config::sync_before_reduce)
      .def_readwrite("sync_after_reduce", &Config::sync_after_reduce)
      .def_readwrite("sync_before_allgather", &Config::sync_before_allgather)
      .def_readwrite("sync_after_allgather", &Config::sync_after_allgather)
      .def_readwrite("pre_div_reduce", &Config::pre_div_reduce)
      .def_readwrite("timeout", &Config::timeout)
      .def_readwrite("debug", &Config::debug);
}

}  // namespace

// Everything that may wait for other ranks or threads lets the interpreter go.
void bindRuntime(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bindConfig(module);

  py::class_<Channel, std::shared_ptr<Channel>>(module, "Channel");
  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
      .def(py::init(&makeRuntime), py::arg("process_group"), py::arg("config"), py::arg("initial_reduce_bucket_size"),
           py::arg("gather"), py::arg("reduce"), py::arg("control"), py::arg("local_ranks"), py::arg("device"),
           py::arg("store"))
      .def(
          "register_param",
          [](Runtime& runtime, std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
             std::optional<at::Tensor> grad_buffer, std::int64_t offset, const std::string& name,
             std::optional<at::ScalarType> reduce_dtype) {
            runtime.registerParam(ds_id, ds_shape, std::move(ds_tensor), grad_buffer.value_or(at::Tensor()), offset,
                                  paramOptions(name, reduce_dtype));
          },
          py::arg("ds_id"), py::arg("ds_shape"), py::arg("ds_tensor"), py::arg("grad_buffer"), py::arg("offset"),
          py::kw_only(), py::arg("name") = "", py::arg("reduce_dtype") = py::none(), NoGil())
      .def(
          "register_z3_param",
          [](Runtime& runtime, std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
             std::optional<at::Tensor> grad_buffer, bool persistent, const std::string& name,
             std::optional<at::ScalarType> reduce_dtype) {
            runtime.registerZ3Param(ds_id, ds_shape, std::move(ds_tensor), grad_buffer.value_or(at::Tensor()),
                                    persistent, paramOptions(name, reduce_dtype));
          },
          py::arg("ds_id"), py::arg("ds_shape"), py::arg("ds_tensor"), py::arg("grad_buffer"),
          py::arg("persistent") = false, py::kw_only(), py::arg("name") = "", py::arg("reduce_dtype") = py::none(),
          NoGil())
      .def("register_graph_z1", &Runtime::registerGraphZ1, py::arg("graph_id"), py::arg("ds_ids"), NoGil())
      .def("register_graph_z2", &Runtime::registerGraphZ2, py::arg("graph_id"), py::arg("ds_ids"), NoGil())
      .def("register_graph_z3", &Runtime::registerGraphZ3, py::arg("graph_id"), py::arg("ds_ids"), py::kw_only(),
           py::arg("reduce_at_update") = false, NoGil())
      .def(
          "empty",
          [](Runtime& runtime, const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
            return runtime.channels().gather->empty(sizes, at::TensorOptions().dtype(dtype).device(runtime.device()));
          },
          py::arg("sizes"), py::arg("dtype"), NoGil())
      .def("set_persistent", &Runtime::setPersistent, py::arg("ds_id"), NoGil())
      .def(
          "set_grad_buffer",
          [](Runtime& runtime, std::int64_t ds_id, std::optional<at::Tensor> grad_buffer,
             std::optional<at::ScalarType> reduce_dtype) {
            runtime.setGradBuffer(ds_id, grad_buffer.value_or(at::Tensor()), reduce_dtype);
          },
          py::arg("ds_id"), py::arg("grad_buffer"), py::arg("reduce_dtype") = py::none(), NoGil())
      .def("plan_reductions", &Runtime::planReductions, py::arg("graph_id"), py::arg("buckets"), py::arg("in_flight"),
           NoGil())
      .def("limit_idle_memory", &Runtime::limitIdleMemory, py::arg("bytes"), NoGil())
      .def("reset_gathered_peak", &Runtime::resetGatheredPeak)
      .def("start_forward", &Runtime::startForward, NoGil())
      .def_static("refuse_direct_gradients", &refuseDirectGradients, py::arg("shard"), py::arg("message"))
      .def("hold_shards", &Runtime::holdShards, py::arg("hold"), NoGil())
      .def("end_reads", &Runtime::endReads, NoGil())
      .def("set_outside_step", &Runtime::setOutsideStep, py::arg("outside"), NoGil())
      .def("timeout", [](Runtime& runtime) { return runtime.context().timeout(); })
      .def("end_forward", &Runtime::endForward, NoGil())
      .def("start_backward", &Runtime::startBackward, py::arg("update"), py::arg("settle_later") = false, NoGil())
      .def("settle", &Runtime::settle, NoGil())
      .def("enable_profiling", &Runtime::enableProfiling, py::arg("enable"))
      .def("is_profiling", &Runtime::isProfiling)
      .def("reset", &Runtime::reset, NoGil())
      .def("invalidate_gathered_param", &Runtime::invalidateGatheredParam, py::arg("ds_id"), NoGil())
      .def("clear_all_gathered_params", &Runtime::clearAllGatheredParams, NoGil())
      .def("gather_small_together", &Runtime::gatherSmallTogether, py::arg("together"), NoGil())
      .def("discard_gradients", &Runtime::discardGradients, py::arg("ds_ids"), NoGil())
      .def("let_gradients_go", &Runtime::letGradientsGo, NoGil())
      .def("sum_over_ranks", &Runtime::sumOverRanks, py::arg("tensor"), NoGil())
      .def("close", &Runtime::close, NoGil())
      .def_property_readonly("states", &Runtime::states)
      .def_property_readonly("trace", [](Runtime& runtime) { return runtime.context().trace; })
      .def_property_readonly("host_is_apart", &Runtime::hostIsApart)
      .def("stats", &statsOf)
      .def("wait_seconds", &waitSeconds);

  module.def("default_runtime", &defaultRuntime);
  module.def("sum_of_squares", &sumOfSquares, py::arg("tensors"), py::arg("device"), NoGil());
  module.def("graph_ids", [] { return GraphTable::global().ids(); });
  module.def("set_default_runtime", &setDefaultRuntime, py::arg("runtime").none(true));
}

}  // namespace dc
