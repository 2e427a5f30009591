"""Teaches torch.compile about the operators, through private parts of PyTorch's compiler.

Without this file:

- operators that are called for their side effect would be removed as dead code;
- those without data inputs would be copied into both the forward and the backward graph;
- Inductor would order operators by data dependencies alone, so a release of a dummy tensor could run before the kernels that
  read the parameter;
- two gathers of one parameter would be merged across the release between them;
- Inductor would reuse the memory of a gathered parameter for its own results after the last use, although the runtime may
  hand the same copy to the next reader;
- donated gradients, whose memory Inductor must not reuse, would be held to the end of the backward.
"""

from __future__ import annotations

import functools
import pathlib
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.fx.node import has_side_effect

from deepcompile.runtime import compile_cache, saved_tensors
from deepcompile.runtime import load as _load  # noqa: F401 - registers torch.ops.dc and torch.ops.deepspeed
from deepcompile.runtime.after_import import after_import
from deepcompile.sharding import sharded_modules

_ops = torch.ops.dc

#: Operators with side effects: kept although nothing reads their results.
EFFECTS = (
    _ops.prefetch_params_fused.default,
    _ops.release_param.default,
    _ops.release_param_traced.default,
    _ops.reduce_grad.default,
    _ops.free_tensors.default,
    _ops.offload_parameter.default,
    _ops.reload_parameter.default,
    _ops.end_backward.default,
    torch.ops.deepspeed.inference_all_reduce.default,
    _ops.prefetch_shards.default,
    _ops.reduce_shard.default,
    _ops.reduce_shards.default,
)

#: Operators that must run in program order.
ORDERED = (
    *EFFECTS,
    _ops.allgather_param.default,
    _ops.wait_allgather.default,
    _ops.offload_tensor.default,
    _ops.reload_tensor.default,
    _ops.wait_offload.default,
    _ops.wait_reload.default,
    _ops.gather_shard.default,
    _ops.gather_shards.default,
)


_COPIES = (_ops.offload_tensor.default, _ops.reload_tensor.default)
_GATHERS = (_ops.gather_shard.default, _ops.gather_shards.default)
_REDUCTIONS = (_ops.reduce_shard.default, _ops.reduce_shards.default)
_RELEASES = (_ops.release_param.default, _ops.release_param_traced.default)


class _GraphOrder:
    """What the lowering of one graph has seen so far of our operators."""

    def __init__(self) -> None:
        self.last_buffer: str | None = None  # of the operator before this one
        self.only_freed: set[str] = (
            set()
        )  # buffers whose memory others may hold: freed after the last use, never reused
        self.leaving: set[str] = set()  # buffers that should be freed early: gathers without `keep`, donated gradients
        self.parameter_buffers: dict[tuple[Any, Any], set[str]] = {}  # (graph_id, id) -> buffers over its memory
        self._readers: dict[str, list[str]] = {}  # buffer -> buffers computed from it
        self._seen_operations = 0
        self._pinned = 0  # operations before the last planned one

    def since_pinned(self, graph: Any) -> list[Any]:
        """The operations since the last planned read that use a buffer in ``leaving``, and the last operation of all. (The
        next planned read comes after these. Other operations may be fused across it.)
        """
        operations = graph.operations[self._pinned :]
        self._pinned = len(graph.operations)

        def holds(operation: Any) -> bool:
            return any(dependency.name in self.leaving for dependency in operation.get_read_writes().reads)

        return [*(one for one in operations[:-1] if holds(one)), *operations[-1:]]

    def readers(self, graph: Any, buffers: set[str]) -> list[str]:
        """All buffers computed from one of ``buffers``. Realizes lazy ones, so that an operator can depend on them."""
        for name in buffers:
            for user in graph.name_to_users.get(name, ()):
                user.realize()
        for operation in graph.operations[self._seen_operations :]:
            outputs = [output.get_name() for output in operation.get_outputs()]
            for dependency in operation.get_read_writes().reads:
                self._readers.setdefault(dependency.name, []).extend(outputs)
        self._seen_operations = len(graph.operations)
        return [reader for name in buffers for reader in self._readers.get(name, ())]


_orders: weakref.WeakKeyDictionary[Any, _GraphOrder] = weakref.WeakKeyDictionary()


def _lower(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Lowers to a call of the operator that runs after our previous operator and, if it is a release, after all readers."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    graph = V.graph
    order = _orders.setdefault(graph, _GraphOrder())
    bound = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    key: tuple[Any, Any] = (bound.get("graph_id"), bound.get("id"))

    chained = op not in _REDUCTIONS  # the runtime puts gradients in order itself
    after = [order.last_buffer] if chained and order.last_buffer is not None else []
    if graph.current_node.meta.get("deepcompile_pinned"):
        # A planned read keeps its place: earlier it would hold memory while the operations before it run.
        after += [output.get_name() for before in order.since_pinned(graph) for output in before.get_outputs()]
    elif graph.current_node.meta.get("deepcompile_late") and graph.operations:
        after += [output.get_name() for output in graph.operations[-1].get_outputs()]
    if op in _RELEASES:
        after += order.readers(graph, order.parameter_buffers.get(key, set()))
    elif op is _ops.free_tensors.default:
        freed = {tensor.realize() or tensor.get_name() for tensor in bound["a"]}
        after += order.readers(graph, freed)
        graph.never_reuse_buffers.update(freed)

    first_new = len(graph.operations)
    result = fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)  # type: ignore[no-untyped-call]
    for operation in graph.operations[first_new:]:
        outputs = {output.get_name() for output in operation.get_outputs()}
        for buffer in after:
            if buffer not in outputs:
                graph.additional_buffer_deps[operation.get_operation_name()].add(buffer)
        if outputs and chained:
            order.last_buffer = next(iter(outputs))
        if op in _GATHERS:
            # Inductor need not assert sizes: the operator checks the shape itself, once for each parameter.
            vars(operation)["codegen_size_asserts"] = _no_asserts
        if op in (_ops.allgather_param.default, _ops.wait_allgather.default):
            order.parameter_buffers.setdefault(key, set()).update(outputs)
            graph.never_reuse_buffers.update(outputs)
        elif op in _GATHERS:
            if not bound.get("keep"):
                order.leaving.update(outputs)
            shared = (
                op is not _ops.gather_shard.default
                or bound.get("keep")
                or graph.current_node.meta.get("deepcompile_shared")
            )
            device = operation.get_device()
            if shared or device is None or device.type == "cpu":
                # Other graphs may read the same copy; on CPU its memory may be the shards themselves (read in place).
                graph.never_reuse_buffers.update(outputs)
                order.only_freed.update(outputs)
        elif op in _COPIES or bound.get("given"):
            # The runtime reads the source after this call has returned, and holds a reference until then.
            sources = {dependency.name for dependency in operation.get_read_writes().reads}
            graph.never_reuse_buffers.update(sources)
            order.only_freed.update(sources)
            order.leaving.update(sources)
    return result


def _no_asserts(wrapper: Any) -> None:
    pass


def _keep_effects_in_their_pass(partitioners: ModuleType) -> None:
    """Tells the partitioner in which graph each side effect belongs. Otherwise it would copy operators without data inputs
    (a prefetch, a release of a dummy), which fit into both graphs, into both.
    """

    def also(predicate: Callable[[torch.fx.Node], bool], tag: str) -> Callable[[torch.fx.Node], bool]:
        @functools.wraps(predicate)
        def extended(node: torch.fx.Node) -> bool:
            return predicate(node) or (node.target in EFFECTS and node.meta.get("partitioner_tag") == tag)

        return extended

    for name, tag in (("_must_be_in_forward", "is_forward"), ("_must_be_in_backward", "is_backward")):
        setattr(partitioners, name, also(getattr(partitioners, name), tag))


def _keep_program_order(post_grad: ModuleType) -> None:
    """Switches off ``reorder_for_locality`` in graphs with our operators. Inductor runs it on graphs without a backward and
    moves nodes next to their users: gathers past each other, though schedules rely on their order, and nodes past releases,
    which have no users.
    """
    reorder = post_grad.reorder_for_locality

    @functools.wraps(reorder)
    def reorder_unless_ordered(graph: torch.fx.Graph) -> None:
        if not any(node.target in ORDERED for node in graph.nodes):
            reorder(graph)

    vars(post_grad)["reorder_for_locality"] = reorder_unless_ordered


def _releases_end_regions(pattern_matcher: ModuleType) -> None:
    """Makes a release count as a mutation for Inductor's passes. They merge equal calls and match patterns only between two
    mutations, and the gathers before and after a release must not be merged.
    """
    is_mutation = pattern_matcher.is_mutation_op

    @functools.wraps(is_mutation)
    def is_mutation_or_release(node: torch.fx.Node) -> bool:
        return node.target in _RELEASES or is_mutation(node)

    vars(pattern_matcher)["is_mutation_op"] = is_mutation_or_release


def _free_donated_buffers(wrapper: ModuleType) -> None:
    """Frees ``only_freed`` buffers after their last use. Inductor by itself neither reuses nor frees buffers in
    ``never_reuse_buffers``, so every donated gradient would be held to the end of the backward.
    """
    codegen = wrapper.PythonWrapperCodegen
    free = codegen.codegen_free

    @functools.wraps(free)
    def free_donated_too(self: Any, buffer: Any) -> None:
        from torch._inductor.virtualized import V

        order, name = _orders.get(V.graph), buffer.get_name()
        removed = name in V.graph.removed_buffers or name in V.graph.graph_inputs or name in V.graph.constants
        if order is None or name not in order.only_freed or removed or name in self.freed:
            free(self, buffer)
            return
        self.freed.add(name)
        self.writeline(wrapper.FreeLine(self, buffer))

    codegen.codegen_free = free_donated_too


def _register_lowerings(lowering: ModuleType) -> None:
    for op in ORDERED:
        lowering.register_lowering(op, type_promotion_kind=None)(functools.partial(_lower, op))


def _skip_our_own_frames(eval_frame: ModuleType) -> None:
    """Keeps Dynamo from compiling our own functions as separate graphs when code that it skips calls them."""
    for function in (saved_tensors._pack, saved_tensors._unpack, *sharded_modules.EAGER_FRAMES):
        eval_frame.skip_code(function.__code__)


def keep_guards(guards: Sequence[Any]) -> list[bool]:
    """A guard filter for ``torch.compile``: leaves out guards on the insides of our properties. They never change, since a
    parameter that is read in another way gets another class; and without them Dynamo can skip unchanged modules quickly.
    """
    ours = tuple(
        guard.name
        for guard in guards
        if guard.name.endswith(".fget") and getattr(guard.value, "__code__", None) in sharded_modules.GETTERS
    )
    return [not guard.name.startswith(ours) for guard in guards]


_FOLDER = pathlib.Path(__file__).parent
compile_cache.note_code([*_FOLDER.glob("*.py"), *_FOLDER.parent.glob("lib/*.so")])
for _op in EFFECTS:
    has_side_effect(_op)
after_import("torch._dynamo.eval_frame", _skip_our_own_frames)
after_import("torch._functorch.partitioners", _keep_effects_in_their_pass)
after_import("torch._inductor.pattern_matcher", _releases_end_regions)
after_import("torch._inductor.fx_passes.post_grad", _keep_program_order)
after_import("torch._inductor.lowering", _register_lowerings)
after_import("torch._inductor.codegen.wrapper", _free_donated_buffers)
