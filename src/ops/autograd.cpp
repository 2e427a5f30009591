// How gradients pass the operators that stand in a forward.
//
// A gather's gradient is reduced, not returned: the shard's own gradient appears when the backward ends, so that
// reductions can be bucketed and overlapped (docs/runtime.md, "Gradients"). The waits and the release are identities.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include "deepcompile/base/error.h"
#include "deepcompile/ops/end_of_backward.h"
#include "deepcompile/ops/kernels.h"
#include "deepcompile/ops/saved_tensor_hooks.h"

namespace dc::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <typename Signature>
auto typedOp(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A CPU tensor with no subclass, no mode, no functionalization: the kernel can be called as it is, without another trip
// through the dispatcher.
bool isPlain(const at::Tensor& tensor) {
  constexpr auto wrapped = c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchGradWrapper});
  return (tensor.is_cpu() || tensor.is_cuda()) && !tensor.key_set().has_any(wrapped) &&
         c10::impl::TorchDispatchModeTLS::stack_len() == 0;
}

struct AllgatherParam : torch::autograd::Function<AllgatherParam> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, std::int64_t graph_id, std::int64_t id,
                            std::optional<at::ScalarType> dtype) {
    context->saved_data["graph_id"] = graph_id;
    context->saved_data["id"] = id;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op =
        typedOp<at::Tensor(const at::Tensor&, std::int64_t, std::int64_t, std::optional<at::ScalarType>)>(
            "dc::allgather_param");
    return op.call(a, graph_id, id, dtype);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    check(!at::GradMode::is_enabled(), [&] {
      return concat("backward of allgather_param (id ", context->saved_data["id"].toInt(),
                    ") with create_graph=True: gradients of sharded parameters cannot be differentiated again");
    });
    if (grads[0].defined() && isPlain(grads[0])) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      reduceGradOfGather(grads[0], context->saved_data["graph_id"].toInt(), context->saved_data["id"].toInt(),
                         /*given=*/true);
    } else if (grads[0].defined()) {
      static const auto op = typedOp<at::Tensor(const at::Tensor&, std::int64_t, std::int64_t)>("dc::reduce_grad");
      op.call(grads[0], context->saved_data["graph_id"].toInt(), context->saved_data["id"].toInt());
    }
    return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor allgatherParamAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id,
                                  std::optional<at::ScalarType> dtype) {
  if (at::GradMode::is_enabled() && isPlain(a)) {
    keepGatheredAsIds();  // also of a frozen one, whose value the gradients of others need
  }
  if (a.requires_grad() && at::GradMode::is_enabled()) {
    return AllgatherParam::apply(a, graph_id, id, dtype);
  }
  if (isPlain(a)) {
    return allgatherParam(a, graph_id, id, dtype);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const auto op =
      typedOp<at::Tensor(const at::Tensor&, std::int64_t, std::int64_t, std::optional<at::ScalarType>)>(
          "dc::allgather_param");
  return op.call(a, graph_id, id, dtype);
}

// In eager code torch.autograd.grad(loss, parameters) would find nothing: gradients of shards do not pass through the
// graph.
void checkNotAskedFor() {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  const auto node = torch::autograd::get_current_node();
  if (nodes == nullptr || nodes->empty() || node == nullptr || node->num_outputs() == 0) {
    return;
  }
  const auto found = nodes->find(node->next_edge(0).function.get());
  check(found == nodes->end() || found->second.captures_ == nullptr,
        "torch.autograd.grad was asked for the gradient of a sharded parameter, which is reduced over the ranks and is "
        "in "
        "param.grad after loss.backward(): call that");
}

// The engine's gather. An eager backward knows the parameter by its id; a traced one by the shard, which is an input of
// the traced graph, so that no id is written into it.
struct GatherShard : torch::autograd::Function<GatherShard> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& shard, std::int64_t graph_id,
                            at::IntArrayRef shape, std::optional<at::ScalarType> dtype, bool keep, std::int64_t guard) {
    context->saved_data["graph_id"] = graph_id;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (isPlain(shard)) {
      context->saved_data["id"] = idOfShard(shard, graph_id);
      return gatherShard(shard, graph_id, shape, dtype, keep, guard);
    }
    context->save_for_backward({shard});
    return typedGatherShard().call(shard, graph_id, shape, dtype, keep, guard);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list none(6);
    if (!grads[0].defined()) {
      return none;
    }
    check(!at::GradMode::is_enabled(),
          "a backward with create_graph=True reached a sharded parameter: its gradient is reduced over the ranks and "
          "cannot be differentiated again");
    const std::int64_t graph_id = context->saved_data["graph_id"].toInt();
    const auto id = context->saved_data.find("id");
    if (id == context->saved_data.end()) {
      static const auto op =
          typedOp<at::Tensor(const at::Tensor&, const at::Tensor&, std::int64_t, bool)>("dc::reduce_shard");
      op.call(grads[0], context->get_saved_variables()[0], graph_id, /*given=*/false);
    } else {
      checkNotAskedFor();
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      reduceGradOfGather(grads[0], graph_id, id->second.toInt(), /*given=*/true);
    }
    return none;
  }

  using Signature = at::Tensor(const at::Tensor&, std::int64_t, at::IntArrayRef, std::optional<at::ScalarType>, bool,
                               std::int64_t);
  static const c10::TypedOperatorHandle<Signature>& typedGatherShard() {
    static const auto op = typedOp<Signature>("dc::gather_shard");
    return op;
  }
};

at::Tensor gatherShardAutograd(const at::Tensor& shard, std::int64_t graph_id, at::IntArrayRef shape,
                               std::optional<at::ScalarType> dtype, bool keep, std::int64_t guard) {
  const bool plain = isPlain(shard);
  if (at::GradMode::is_enabled() && plain) {
    keepGatheredAsIds();  // also of a frozen one, whose value the gradients of others need
  }
  const auto gather = [&] {
    if (shard.requires_grad() && at::GradMode::is_enabled()) {
      return GatherShard::apply(shard, graph_id, shape, dtype, keep, guard);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return plain ? gatherShard(shard, graph_id, shape, dtype, keep, guard)
                 : GatherShard::typedGatherShard().call(shard, graph_id, shape, dtype, keep, guard);
  };
  at::Tensor gathered = gather();
  if (plain && guard == kForbidWriting) [[unlikely]] {
    refuseUseAsParameter(gathered, shard, graph_id);
  }
  return gathered;
}

// Its output is empty and carries no gradient.
at::Tensor reduceShardAutograd(const at::Tensor& grad, const at::Tensor& shard, std::int64_t graph_id, bool given) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const auto op =
      typedOp<at::Tensor(const at::Tensor&, const at::Tensor&, std::int64_t, bool)>("dc::reduce_shard");
  return op.call(grad, shard, graph_id, given);
}

// Only compiled graphs have it, whose backward is written out.
std::vector<at::Tensor> gatherShardsAutograd(at::TensorList shards, std::int64_t graph_id, at::IntArrayRef shapes,
                                             at::IntArrayRef dims) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  using Signature = std::vector<at::Tensor>(at::TensorList, std::int64_t, at::IntArrayRef, at::IntArrayRef);
  static const auto op = typedOp<Signature>("dc::gather_shards");
  return op.call(shards, graph_id, shapes, dims);
}

// An operator whose output is, or copies, its first argument: the gradient passes unchanged, to the
// device that the argument is on.
template <typename... Rest>
struct Identity : torch::autograd::Function<Identity<Rest...>> {
  static at::Tensor forward(AutogradContext* context, const std::string& name, const at::Tensor& a, Rest... rest) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    context->saved_data["device"] = a.device();
    return typedOp<at::Tensor(const at::Tensor&, Rest...)>(name.c_str()).call(a, rest...);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list all(2 + sizeof...(Rest));
    all[1] = grads[0].defined() ? grads[0].to(context->saved_data["device"].toDevice()) : grads[0];
    return all;
  }
};

template <typename... Rest>
at::Tensor identity(const char* name, const at::Tensor& a, Rest... rest) {
  if (a.requires_grad() && at::GradMode::is_enabled()) {
    return Identity<Rest...>::apply(std::string(name), a, rest...);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return typedOp<at::Tensor(const at::Tensor&, Rest...)>(name).call(a, rest...);
}

// The operators that return their input. Eagerly that very tensor comes back, with the history it has; only where a
// wrapper makes a new tensor of it does it need an identity in the autograd graph.
template <typename... Rest>
at::Tensor sameTensor(const char* name, void (*kernel)(const at::Tensor&, Rest...), const at::Tensor& a, Rest... rest) {
  if (isPlain(a)) {
    kernel(a, rest...);
    return a;
  }
  return identity(name, a, rest...);
}

at::Tensor waitAllgatherAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return sameTensor("dc::wait_allgather", waitAllgather, a, graph_id, id);
}
at::Tensor releaseParamAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users) {
  return sameTensor("dc::release_param", releaseParam, a, graph_id, id, n_users);
}
at::Tensor releaseParamTracedAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id,
                                      std::int64_t n_users) {
  return sameTensor("dc::release_param_traced", releaseParamTraced, a, graph_id, id, n_users);
}
at::Tensor waitOffloadAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return sameTensor("dc::wait_offload", waitOffload, a, graph_id, id);
}
at::Tensor waitReloadAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return sameTensor("dc::wait_reload", waitReload, a, graph_id, id);
}
at::Tensor offloadTensorAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return identity("dc::offload_tensor", a, graph_id, id);
}
at::Tensor reloadTensorAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return identity("dc::reload_tensor", a, graph_id, id);
}

// Its output is empty and carries no gradient.
at::Tensor reduceGradAutograd(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  if (isPlain(a)) {
    return reduceGrad(a, graph_id, id);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const auto op = typedOp<at::Tensor(const at::Tensor&, std::int64_t, std::int64_t)>("dc::reduce_grad");
  return op.call(a, graph_id, id);
}

}  // namespace

SavedTensorHooks& savedTensorHooks() {
  static SavedTensorHooks hooks;
  return hooks;
}

namespace {

// An autograd run of this thread. Its callbacks own it, so it is gone when the run has ended, in an error too.
struct AutogradRun {
  std::int64_t task;
  std::vector<std::int64_t> graphs;  // whose backward ends with it
  bool ended = false;
};

// The outermost run; null outside of one. Two runs at once in one thread are nested.
std::shared_ptr<AutogradRun> outermostRun() {
  thread_local std::weak_ptr<AutogradRun> known;
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    return nullptr;
  }
  std::shared_ptr<AutogradRun> run = known.lock();
  if (run == nullptr || run->ended) {
    run = std::make_shared<AutogradRun>(AutogradRun{task, {}});
    known = run;
    torch::autograd::Engine::get_default_engine().queue_callback([run] {
      run->ended = true;
      for (const std::int64_t graph_id : std::exchange(run->graphs, {})) {
        endBackward(graph_id);
      }
    });
  }
  return run;
}

}  // namespace

bool insideAutograd() { return outermostRun() != nullptr; }

std::int64_t outermostAutogradTask() {
  const auto run = outermostRun();
  return run == nullptr ? -1 : run->task;
}

void endWithAutograd(std::int64_t graph_id) {
  const auto run = outermostRun();
  if (run != nullptr && std::find(run->graphs.begin(), run->graphs.end(), graph_id) == run->graphs.end()) {
    run->graphs.push_back(graph_id);
  }
}

}  // namespace dc::ops

TORCH_LIBRARY_IMPL(dc, Autograd, m) {
  using namespace dc::ops;
  m.impl("allgather_param", allgatherParamAutograd);
  m.impl("wait_allgather", waitAllgatherAutograd);
  m.impl("release_param", releaseParamAutograd);
  m.impl("release_param_traced", releaseParamTracedAutograd);
  m.impl("wait_offload", waitOffloadAutograd);
  m.impl("wait_reload", waitReloadAutograd);
  m.impl("offload_tensor", offloadTensorAutograd);
  m.impl("reload_tensor", reloadTensorAutograd);
  m.impl("reduce_grad", reduceGradAutograd);
  m.impl("gather_shard", gatherShardAutograd);
  m.impl("reduce_shard", reduceShardAutograd);
  m.impl("gather_shards", gatherShardsAutograd);
  // These return nothing that a gradient could pass. Said here, they need no fallback, which packs all arguments.
  for (const char* name :
       {"prefetch_params_fused", "prefetch_shards", "reduce_shards", "free_tensors", "move_states", "end_backward"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}
