// The operators' schemas. Aliasing in a schema is the truth: what returns Tensor(a) returns its input. None of them can
// be captured in a CUDA graph: they ask on the host what has passed, and give other memory every time. The tag makes
// Inductor capture the compute between them instead.
#include <torch/library.h>

TORCH_LIBRARY(dc, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::cudagraph_unsafe}); };
  define("allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype=None) -> Tensor");
  define("prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()");
  define("wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  define("release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
  define("reduce_grad(Tensor a, int graph_id, int id) -> Tensor");
  define("free_tensors(Tensor[] a) -> ()");
  define("offload_tensor(Tensor a, int graph_id, int id) -> Tensor");
  define("reload_tensor(Tensor a, int graph_id, int id) -> Tensor");
  define("wait_offload(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  define("wait_reload(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
  define("offload_parameter(Tensor a, int graph_id, int id) -> ()");
  define("reload_parameter(Tensor a, int graph_id, int id) -> ()");
  define("end_backward(int graph_id) -> ()");

  // Internal, of the engine. These find the parameter by its shard instead of an id, so that equal layers share one
  // compiled graph. The gathered memory belongs to the returned tensor: no release is needed. `keep` leaves a copy for
  // later gathers; `guard` says what a writer to the tensor meets (kernels.h).
  define(
      "gather_shard(Tensor shard, int graph_id, int[] shape, ScalarType? dtype=None, bool keep=False, int "
      "guard=0) -> Tensor");
  define("prefetch_shards(Tensor[] shards, int graph_id, ScalarType[] dtypes) -> ()");
  // `given` says that nobody writes to the gradient's memory any more: it may be read after the call has returned.
  define("reduce_shard(Tensor grad, Tensor shard, int graph_id, bool given=False) -> Tensor");
  // Many in one call, for where the calls would take longer than what they do. Here `given` says that nobody reads the
  // gradient's memory either: it may become the gradient buffer.
  define("gather_shards(Tensor[] shards, int graph_id, int[] shapes, int[] dims) -> Tensor[]");
  define("reduce_shards(Tensor[] grads, Tensor[] shards, int graph_id, int[] given) -> ()");
  // An optimizer's states, by the ids of their parameters: start to leave, are gone, start to return (state_offload.h).

  // Internal: what release_param becomes in a traced graph. A partitioner may leave views of the parameter behind the
  // release (for what is saved for the backward); so the storage keeps its nominal size, though not its memory.
  define("release_param_traced(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
}
