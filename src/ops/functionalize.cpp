// Functionalization refuses operators whose output aliases an input, unless they say themselves what to do. Ours hand
// on the value they order: in the functional graph each is a node whose output stands for its input from there on.
#include <ATen/FunctionalTensorWrapper.h>
#include <torch/library.h>

namespace dc::ops {
namespace {

template <typename... Rest>
at::Tensor callFunctional(const char* name, const at::Tensor& a, Rest... rest) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(const at::Tensor&, Rest...)>();
  if (!at::functionalization::impl::isFunctionalTensor(a)) {
    const at::AutoDispatchSkipFunctionalize below_functionalize;
    return op.call(a, rest...);
  }
  at::functionalization::impl::sync(a);
  const at::Tensor inner = at::functionalization::impl::from_functional_tensor(a);
  const at::AutoDispatchSkipFunctionalize below_functionalize;
  return at::functionalization::impl::to_functional_tensor(op.call(inner, rest...));
}

at::Tensor waitAllgather(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return callFunctional("dc::wait_allgather", a, graph_id, id);
}
at::Tensor releaseParam(const at::Tensor& a, std::int64_t graph_id, std::int64_t id, std::int64_t n_users) {
  return callFunctional("dc::release_param_traced", a, graph_id, id, n_users);
}
at::Tensor waitOffload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return callFunctional("dc::wait_offload", a, graph_id, id);
}
at::Tensor waitReload(const at::Tensor& a, std::int64_t graph_id, std::int64_t id) {
  return callFunctional("dc::wait_reload", a, graph_id, id);
}

}  // namespace
}  // namespace dc::ops

TORCH_LIBRARY_IMPL(dc, Functionalize, m) {
  m.impl("wait_allgather", dc::ops::waitAllgather);
  m.impl("release_param", dc::ops::releaseParam);
  m.impl("release_param_traced", dc::ops::releaseParam);
  m.impl("wait_offload", dc::ops::waitOffload);
  m.impl("wait_reload", dc::ops::waitReload);
}
