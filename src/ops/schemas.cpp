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

  // Internal, of the engine. These find the parameter by its shard instead of an id, so that equal layers share one
  // compiled graph. The gathered memory belongs to the returned tensor: no release is needed. `keep` leaves a copy for
  // later gathers; `guard` says what a writer to the tensor meets (kernels.h).
  m.def(
      "gather_shard(Tensor shard, int graph_id, int[] shape, ScalarType? dtype=None, bool keep=False, int "
      "guard=0) -> Tensor");
  m.def("prefetch_shards(Tensor[] shards, int graph_id, ScalarType[] dtypes) -> ()");
  // `given` says that nobody writes to the gradient's memory any more: it may be read after the call has returned.
  m.def("reduce_shard(Tensor grad, Tensor shard, int graph_id, bool given=False) -> Tensor");
  // Many in one call, for where the calls would take longer than what they do. Here `given` says that nobody reads the
  // gradient's memory either: it may become the gradient buffer.
  m.def("gather_shards(Tensor[] shards, int graph_id, int[] shapes, int[] dims) -> Tensor[]");
  m.def("reduce_shards(Tensor[] grads, Tensor[] shards, int graph_id, int[] given) -> ()");

  // Internal: what release_param becomes in a traced graph. A partitioner may leave views of the parameter behind the
  // release (for what is saved for the backward); so the storage keeps its nominal size, though not its memory.
  m.def("release_param_traced(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
}
