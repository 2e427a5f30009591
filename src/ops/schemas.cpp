// The operators' schemas. Aliasing in a schema is the truth: what returns Tensor(a) returns its input.
#include <torch/library.h>

TORCH_LIBRARY(dc, m) {
  m.def("allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype=None) -> Tensor");
  m.def("prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()");
  m.def("wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  m.def("release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
  m.def("reduce_grad(Tensor a, int graph_id, int id) -> Tensor");
  m.def("free_tensors(Tensor[] a) -> ()");
  m.def("offload_tensor(Tensor a, int graph_id, int id) -> Tensor");
  m.def("reload_tensor(Tensor a, int graph_id, int id) -> Tensor");
  m.def("wait_offload(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  m.def("wait_reload(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  m.def("offload_parameter(Tensor a, int graph_id, int id) -> ()");
  m.def("reload_parameter(Tensor a, int graph_id, int id) -> ()");
  m.def("end_backward(int graph_id) -> ()");

  // Internal: what release_param becomes in a traced graph. A partitioner may leave views of the parameter behind the
  // release (for what is saved for the backward); so the storage keeps its nominal size, though not its memory.
  m.def("release_param_traced(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
}
