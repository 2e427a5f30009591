#include "deepcompile/ops/kernels.h"

#include <memory>
#include <mutex>
#include <optional>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/comm/interpreter.h"
#include "deepcompile/ops/end_of_backward.h"
#include "deepcompile/ops/saved_tensor_hooks.h"
#include "deepcompile/ops/shapes_in_a_row.h"
#include "deepcompile/runtime/gathered.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/parameter_misuse.h"
#include "deepcompile/runtime/runtime.h"
#include "deepcompile/runtime/storage_guard.h"
#include "deepcompile/runtime/z3_executor.h"

namespace dc::ops {
namespace {

// What an operator waits for, beside its runtime's lock. Those that always may are called without the interpreter; the
// others may come with it: to give it away and take it back takes some 500 instructions, a third of a release.
enum class Waits {
  Always,
  OnHostsOnly,  // on a device it is the device that waits
  Never,
};

// A graph with its runtime's lock held, and all ranks agreed on what is registered.
class Locked {
 public:
  explicit Locked(std::int64_t graph_id, Waits waits = Waits::Always)
      : graph_(GraphTable::global().find(graph_id)), lock_(graph_->runtime->context().mutex, std::defer_lock) {
    if (!takeAtOnce(waits)) {
      if (waits != Waits::Always) {
        released_.emplace();
      }
      lock_.lock();
    }
    graph_->runtime->context().late_error->raise();
    graph_->runtime->ensureAgreed();
  }

  const Graph& graph() const { return *graph_; }
  CustomOpExecutor& executor() const { return *graph_->executor; }

  Z3CustomOpExecutor& z3(const char* op) const {
    check(graph_->z3 != nullptr, [&] {
      return concat(op, ": graph ", graph_->id, " was not registered with register_graph_z3; only ZeRO-3 gathers");
    });
    return *graph_->z3;
  }

 private:
  // True with the lock, where nothing else is to be waited for. A thread that waits, for the lock or under it, must not
  // hold the interpreter: the one that it waits for may need it.
  bool takeAtOnce(Waits waits) {
    const Context& context = graph_->runtime->context();
    if (waits == Waits::Always || (waits == Waits::OnHostsOnly && !context.device_order) || context.config.debug ||
        !lock_.try_lock()) {
      return false;
    }
    if (!graph_->runtime->agreed()) {
      lock_.unlock();
      return false;
    }
    return true;
  }

  std::shared_ptr<const Graph> graph_;
  std::optional<InterpreterReleased> released_;  // is taken back when the lock is free again
  std::unique_lock<std::mutex> lock_;
};

}  // namespace

at::Tensor allgatherParam(const at::Tensor&, std::int64_t graph_id, std::int64_t id,
                          std::optional<at::ScalarType> dtype) {
  insideAutograd();
  return Locked(graph_id).z3("allgather_param").allgatherParam(id, dtype);
}

void prefetchParamsFused(std::int64_t graph_id, at::TensorList params, at::IntArrayRef ids,
                         const std::optional<std::vector<at::ScalarType>>& dtypes) {
  check(params.size() == ids.size(), [&] {
    return concat("prefetch_params_fused: ", params.size(), " tensors for ", ids.size(), " ids (graph ", graph_id, ")");
  });
  Locked(graph_id).z3("prefetch_params_fused").gatherer().prefetch(ids.vec(), dtypes);
}

void waitAllgather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  Locked(graph_id, Waits::OnHostsOnly).z3("wait_allgather").gatherer().wait(a, id);
}

void releaseParam(const at::Tensor&, std::int64_t graph_id, std::int64_t id, std::int64_t n_users) {
  Locked(graph_id, Waits::Never).z3("release_param").gatherer().release(id, n_users, ReleasedSize::Zero);
}

void releaseParamTraced(const at::Tensor&, std::int64_t graph_id, std::int64_t id, std::int64_t n_users) {
  Locked(graph_id, Waits::Never).z3("release_param").gatherer().release(id, n_users, ReleasedSize::Nominal);
}

namespace {

at::Tensor reduceWith(const Locked& locked, const at::Tensor& grad, std::int64_t id, GradientMemory memory) {
  CustomOpExecutor& executor = locked.executor();
  GradientReducer& reducer = executor.reducer();
  reducer.noteAutogradTask(outermostAutogradTask());
  at::Tensor result = executor.reduceGradIn(grad, id, memory);
  if (reducer.begunByGradient() && reducer.open()) {
    endWithAutograd(locked.graph().id);
  }
  return result;
}

}  // namespace

at::Tensor reduceGrad(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return reduceWith(Locked(graph_id), a, id, GradientMemory::Borrowed);
}

void freeTensors(at::TensorList tensors) {
  const auto runtime = defaultRuntime();  // the operator names no graph
  check(runtime != nullptr, "free_tensors: no default runtime; call dc.init first");
  if (runtime->isProfiling()) {
    return;
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() <= runtime->context().config.free_activation_threshold || gatherKeyOf(tensor)) {
      continue;  // gathered parameters have an owner of their own
    }
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    storage.set_data_ptr(c10::DataPtr(nullptr, tensor.device()));
    storage.set_nbytes(std::size_t{0});
    guardStorage(storage, "an activation is read after free_tensors freed it");
    runtime->context().stats.activations_freed.fetch_add(1, std::memory_order_relaxed);
  }
}

at::Tensor offloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return Locked(graph_id).graph().offload->offload(a, id);
}

at::Tensor reloadTensor(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return Locked(graph_id).graph().offload->reload(a, id);
}

void waitOffload(const at::Tensor&, std::int64_t graph_id, std::int64_t id) {
  Locked(graph_id).graph().offload->waitOffload(id);
}

void waitReload(const at::Tensor&, std::int64_t graph_id, std::int64_t id) {
  Locked(graph_id).graph().offload->waitReload(id);
}

void offloadParameter(const at::Tensor&, std::int64_t graph_id, std::int64_t id) {
  Locked(graph_id).z3("offload_parameter").gatherer().offload(id);
}

void reloadParameter(const at::Tensor&, std::int64_t graph_id, std::int64_t id) {
  Locked(graph_id).z3("reload_parameter").gatherer().reload(id);
}

at::Tensor reduceGradOfGather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, bool given) {
  const Locked locked(graph_id);
  locked.z3("reduce_grad").allowReduction(id);
  return reduceWith(locked, a, id, given ? GradientMemory::Donated : GradientMemory::Borrowed);
}

std::int64_t idOfShard(const at::Tensor& shard, std::int64_t graph_id) {
  return Locked(graph_id).graph().runtime->registry().idOf(shard);
}

namespace {

at::Tensor gatherWith(const Locked& locked, const at::Tensor& shard, at::IntArrayRef shape,
                      std::optional<at::ScalarType> dtype, bool keep, std::int64_t guard) {
  const std::int64_t id = locked.graph().runtime->registry().idOf(shard);
  at::Tensor gathered = locked.z3("gather_shard").gatherer().read(id, dtype, keep, insideAutograd(), guard == kNoGuard);
  const DSParam& param = locked.graph().runtime->registry().getParam(id);
  check(gathered.sizes() == shape, [&] {
    return concat("gather_shard: ", param.describe(), " was asked for in shape [", join_as_str(shape, ", "), "]");
  });
  Context& context = locked.graph().runtime->context();
  if (guard == kNoGuard) {
    allowWriting(gathered);
  } else {
    guardWriting(gathered, guard == kForbidWriting ? Writing::Forbidden : Writing::Noticed, param.writeError(),
                 context.late_error);
  }
  context.late_error->raise();
  return gathered;
}

}  // namespace

at::Tensor gatherShard(const at::Tensor& shard, std::int64_t graph_id, at::IntArrayRef shape,
                       std::optional<at::ScalarType> dtype, bool keep, std::int64_t guard) {
  return gatherWith(Locked(graph_id), shard, shape, dtype, keep, guard);
}

void refuseUseAsParameter(const at::Tensor& gathered, const at::Tensor& shard, std::int64_t graph_id) {
  const Locked locked(graph_id);
  Runtime& runtime = *locked.graph().runtime;
  const DSParam& param = runtime.registry().getParam(runtime.registry().idOf(shard));
  dc::refuseUseAsParameter(gathered, param.label(), runtime.context().late_error);
}

std::vector<at::Tensor> gatherShards(at::TensorList shards, std::int64_t graph_id, at::IntArrayRef shapes,
                                     at::IntArrayRef dims) {
  const Locked locked(graph_id);
  std::vector<at::Tensor> gathered;
  gathered.reserve(shards.size());
  eachShape(shards.size(), shapes, dims, [&](std::size_t i, at::IntArrayRef shape) {
    gathered.push_back(gatherWith(locked, shards[i], shape, std::nullopt, /*keep=*/false, kNoGuard));
  });
  return gathered;
}

void prefetchShards(at::TensorList shards, std::int64_t graph_id, const std::vector<at::ScalarType>& dtypes) {
  const Locked locked(graph_id);
  std::vector<std::int64_t> ids;
  for (const at::Tensor& shard : shards) {
    ids.push_back(locked.graph().runtime->registry().idOf(shard));
  }
  locked.z3("prefetch_shards").gatherer().readGroup(ids, dtypes, insideAutograd());
}

at::Tensor reduceShard(const at::Tensor& grad, const at::Tensor& shard, std::int64_t graph_id, bool given) {
  // Only traced code calls the operator: an eager backward reduces by id.
  GraphTable::global().find(graph_id)->runtime->context().trace->noteCompiledCode();
  return reduceGradOfGather(grad, graph_id, idOfShard(shard, graph_id), given);
}

void reduceShards(at::TensorList grads, at::TensorList shards, std::int64_t graph_id, at::IntArrayRef given) {
  check(grads.size() == shards.size() && grads.size() == given.size(), [&] {
    return concat("reduce_shards: ", grads.size(), " gradients for ", shards.size(), " shards and ", given.size(),
                  " flags (graph ", graph_id, ")");
  });
  const Locked locked(graph_id);
  Runtime& runtime = *locked.graph().runtime;
  runtime.context().trace->noteCompiledCode();
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const std::int64_t id = runtime.registry().idOf(shards[i]);
    locked.z3("reduce_shards").allowReduction(id);
    reduceWith(locked, grads[i], id, given[i] != 0 ? GradientMemory::DonatedForGood : GradientMemory::Borrowed);
  }
}

void endBackward(std::int64_t graph_id) {
  const Locked locked(graph_id);
  locked.executor().endBackward();
  locked.graph().runtime->setTimeouts();
  stopKeepingGatheredAsIds();
}

}  // namespace dc::ops
