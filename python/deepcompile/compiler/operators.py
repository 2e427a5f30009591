"""Teaches torch.compile about the operators. The one file that touches private parts of PyTorch's compiler.

Six things would go wrong without it. Operators that are called for their effect would be dropped as dead code, or, where
they take no data, be copied into the forward and the backward graph alike. Inductor would order them by data alone, and a
release that takes a dummy tensor depends on no data: it could run before the kernels that read the parameter. Two gathers
of one parameter would be merged across the release between them. Inductor would use the memory of a gathered parameter, once
it is done with it, for results of its own, though the runtime may hand the same memory to the next reader. And a gradient
that is reduced from where it lies, which Inductor must not use again either, it would hold to the end of the backward.
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

#: Called for their effect: kept although nothing reads what they return.
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

#: All operators, in the order in which the program calls them.
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
    """What lowering one graph has seen so far of our operators."""

    def __init__(self) -> None:
        self.last_buffer: str | None = None  # of the operator before this one
        self.only_freed: set[str] = set()  # buffers over memory that others may hold: let go of, never used for results
        self.leaving: set[str] = set()  # gathered parameters that are not kept, and gradients
        self.parameter_buffers: dict[tuple[Any, Any], set[str]] = {}  # (graph_id, id) -> buffers over its memory
        self._readers: dict[str, list[str]] = {}  # buffer -> buffers computed from it
        self._seen_operations = 0
        self._pinned = 0  # operations before the last planned one

    def since_pinned(self, graph: Any) -> list[Any]:
        """The operations from the last planned one on that hold what leaves with them, gathered parameters or gradients, and
        the last of all. Others may be fused with what comes later.
        """
        operations = graph.operations[self._pinned :]
        self._pinned = len(graph.operations)

        def holds(operation: Any) -> bool:
            return any(dependency.name in self.leaving for dependency in operation.get_read_writes().reads)

        return [*(one for one in operations[:-1] if holds(one)), *operations[-1:]]

    def readers(self, graph: Any, buffers: set[str]) -> list[str]:
        """Everything that reads one of the buffers, made real so that it can be waited for."""
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
    """Lowers to a call of the operator that runs after the one before it and, for a release, after all readers."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    graph = V.graph
    order = _orders.setdefault(graph, _GraphOrder())
    bound = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    key: tuple[Any, Any] = (bound.get("graph_id"), bound.get("id"))

    chained = op not in _REDUCTIONS  # gradients find their order in the runtime
    after = [order.last_buffer] if chained and order.last_buffer is not None else []
    if graph.current_node.meta.get("deepcompile_pinned"):
        # Planned: not earlier, where it would hold memory beside what those before it use, nor later than the graph says.
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
            # The operator checks the shape itself, once for a parameter and not again for every reader.
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
                # Others may read the same memory; on CPU it may be the shards themselves.
                graph.never_reuse_buffers.update(outputs)
                order.only_freed.update(outputs)
        elif op in _COPIES or bound.get("given"):
            # It reads its source after this call has returned, and holds it as long as it needs it.
            sources = {dependency.name for dependency in operation.get_read_writes().reads}
            graph.never_reuse_buffers.update(sources)
            order.only_freed.update(sources)
            order.leaving.update(sources)
    return result


def _no_asserts(wrapper: Any) -> None:
    pass


def _keep_effects_in_their_pass(partitioners: ModuleType) -> None:
    """An operator that takes no data (a prefetch, a release of a dummy) fits into the forward and into the backward graph
    alike, and the partitioner copies such operators into both when they must not be dropped. Tells it where each belongs.
    """

    def also(predicate: Callable[[torch.fx.Node], bool], tag: str) -> Callable[[torch.fx.Node], bool]:
        @functools.wraps(predicate)
        def extended(node: torch.fx.Node) -> bool:
            return predicate(node) or (node.target in EFFECTS and node.meta.get("partitioner_tag") == tag)

        return extended

    for name, tag in (("_must_be_in_forward", "is_forward"), ("_must_be_in_backward", "is_backward")):
        setattr(partitioners, name, also(getattr(partitioners, name), tag))


def _keep_program_order(post_grad: ModuleType) -> None:
    """In graphs without a backward Inductor moves nodes next to their users: a gather past another, which schedules have in
    the graph's order, and whatever it likes past a release, which has no users.
    """
    reorder = post_grad.reorder_for_locality

    @functools.wraps(reorder)
    def reorder_unless_ordered(graph: torch.fx.Graph) -> None:
        if not any(node.target in ORDERED for node in graph.nodes):
            reorder(graph)

    vars(post_grad)["reorder_for_locality"] = reorder_unless_ordered


def _releases_end_regions(pattern_matcher: ModuleType) -> None:
    """Equal calls are merged, and patterns matched, only between two mutations. A release ends a parameter like one: the
    gather after it is not the one before it.
    """
    is_mutation = pattern_matcher.is_mutation_op

    @functools.wraps(is_mutation)
    def is_mutation_or_release(node: torch.fx.Node) -> bool:
        return node.target in _RELEASES or is_mutation(node)

    vars(pattern_matcher)["is_mutation_op"] = is_mutation_or_release


def _free_donated_buffers(wrapper: ModuleType) -> None:
    """What Inductor may not use again it does not free either: every gradient would be held to the end of the backward."""
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
    """Called from code that Dynamo leaves alone, these would be compiled as graphs of their own."""
    for function in (saved_tensors._pack, saved_tensors._unpack, *sharded_modules.EAGER_FRAMES):
        eval_frame.skip_code(function.__code__)


def keep_guards(guards: Sequence[Any]) -> list[bool]:
    """Leaves out Dynamo's guards on what our properties are made of. That never changes: another reading of a parameter is
    another class. But these guards keep Dynamo from seeing at a glance that the modules around them are as they were.
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
