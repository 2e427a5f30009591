"""Cuts a traced graph into segments, the units that the planner works with.

A *segment* begins at a node that uses a large parameter and ends before the next such node. Collectives are launched and
waited for between segments only. So a plan depends on segments and parameters only, and fits every graph of the same
structure, whatever its shapes. Small parameters (norms, biases) begin no segment, so that their reads do not separate
operations that Inductor would fuse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from deepcompile.compiler.live_memory import is_view, live_bytes, storages, tensor_bytes
from deepcompile.runtime import load as _load  # noqa: F401 - registers torch.ops.dc

_ops = torch.ops.dc
GATHER = _ops.gather_shard.default
REDUCE = _ops.reduce_shard.default
PREFETCH = _ops.prefetch_shards.default

FORWARD, BACKWARD = "forward", "backward"

#: Parameters of up to this many bytes are small, if they are also much smaller than the largest.
SMALL_BYTES = 64 * 1024
SMALL_PART = 16

#: Rates by which nodes are weighed against each other until they are measured.
FLOPS_PER_SECOND = 40e9
BYTES_PER_SECOND = 10e9


@dataclasses.dataclass(frozen=True)
class GatheredParam:
    """A parameter as the graph shows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass
class Segment:
    first: fx.Node | None  # None: the graph's beginning
    uses: list[str] = dataclasses.field(default_factory=list)  # parameters, in order of first use in the segment
    grads: list[str] = dataclasses.field(default_factory=list)  # parameters whose last gradient is made here
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # estimated
    workspace: int = 0  # most bytes of values that come and go within the graph


@dataclasses.dataclass
class Segments:
    """One graph, cut."""

    params: dict[str, GatheredParam]
    segments: list[Segment]
    roots: dict[fx.Node, tuple[str, ...]]  # gathers, and nodes computed only from gathers -> their parameters

    @property
    def structure(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """All that a plan depends on, except times and sizes."""
        return tuple((tuple(segment.uses), tuple(segment.grads)) for segment in self.segments)

    def without_nodes(self, names: Mapping[str, str]) -> Segments:
        """A copy without references to graph nodes, with parameters renamed by ``names``."""

        def renamed(params: Iterable[str]) -> list[str]:
            return [names.get(param, param) for param in params]

        params = {
            names.get(name, name): dataclasses.replace(param, name=names.get(name, name))
            for name, param in self.params.items()
        }
        segments = [
            Segment(None, renamed(one.uses), renamed(one.grads), [], one.seconds, one.workspace)
            for one in self.segments
        ]
        return Segments(params, segments, {})


def name_of(node: fx.Node) -> str:
    """The parameter of a gather or a reduction; the name of the shard's placeholder before :func:`mark_params`."""
    shard = node.args[0] if node.target is GATHER else node.args[1]
    assert isinstance(shard, fx.Node)
    return str(node.meta.get("deepcompile_param", shard.name))


def mark_params(graphs: Iterable[fx.GraphModule], names: dict[str, str]) -> None:
    """Writes the parameter's name on each gather and reduction. ``names``: by placeholder."""
    for module in graphs:
        for node in module.graph.nodes:
            if node.target in (GATHER, REDUCE):
                shard = node.args[0] if node.target is GATHER else node.args[1]
                node.meta["deepcompile_param"] = names.get(shard.name, shard.name)


def donate_gradients(graph: fx.Graph) -> None:
    """Sets the argument ``given`` of reductions whose gradient has no other reader in the graph: the gradient is donated, so
    the runtime may use its memory instead of a copy.
    """
    for node in graph.nodes:
        if node.target is REDUCE and _is_only_read_by(node.args[0], node):
            node.args = (*node.args[:3], True)


def reduce_small_later(graph: fx.Graph) -> None:
    """Moves the reductions of small gradients down to the next read or large reduction. Between other operations a reduction
    would prevent their fusion into one kernel.
    """
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is REDUCE and tensor_bytes(node.args[0].meta.get("val")) <= SMALL_BYTES:
            waiting.append(node)
        elif node.target in (GATHER, REDUCE) or node.op == "output":
            for reduction in waiting:
                node.prepend(reduction)
                reduction.meta["deepcompile_late"] = True
            waiting.clear()


def share_gathers(graph: fx.Graph) -> None:
    """Compiled so that other graphs may share its gathered buffers: Inductor must not reuse their memory."""
    for node in graph.nodes:
        if node.target is GATHER:
            node.meta["deepcompile_shared"] = True


def _is_only_read_by(value: Any, reader: fx.Node) -> bool:
    """Whether ``value`` and every tensor that it is a view of were computed in this graph and have no other reader."""
    while isinstance(value, fx.Node) and value.op == "call_function" and set(value.users) == {reader}:
        source = value.args[0] if value.target is operator.getitem else value
        if not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload):
            return False
        is_view = source.target._opname == "_unsafe_view" or any(
            out.alias_info for out in source.target._schema.returns
        )
        if not is_view:
            return True
        value, reader = (source, value) if source is not value else (value.args[0], value)
    return False


def has_gathers(graph: fx.Graph) -> bool:
    return any(node.target in (GATHER, REDUCE) for node in graph.nodes)


def only_from_gathers(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """Gathers and every node whose tensors come from gathers alone, with the parameters they come from."""
    roots: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.target is GATHER:
            roots[node] = (name_of(node),)
        elif node.op == "call_function" and node.target not in (REDUCE, PREFETCH):
            inputs = [source for source in node.all_input_nodes if _is_tensor(source)]
            if inputs and all(source in roots for source in inputs) and not _is_random_or_mutating(node):
                roots[node] = tuple(dict.fromkeys(name for source in inputs for name in roots[source]))
    return roots


def _is_random_or_mutating(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, list, tuple))


def cut(graph: fx.Graph, fuses: bool = True) -> Segments:
    """``fuses``: the compiler inlines values that are read element by element, so they take no memory."""
    roots = only_from_gathers(graph)
    live = live_bytes(graph, _counted_by_name(graph, roots), fuses)
    params: dict[str, GatheredParam] = {}
    for node in graph.nodes:
        if node.target is GATHER:
            params[name_of(node)] = _gathered_param(node)
    small = small_params(params.values())
    segments = [Segment(None)]
    last_reduction = {name_of(node): node for node in graph.nodes if node.target is REDUCE}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in roots:
            continue
        if node.target is REDUCE:
            if last_reduction[name_of(node)] is node:
                segments[-1].grads.append(name_of(node))
            continue
        used = dict.fromkeys(name for source in node.all_input_nodes for name in roots.get(source, ()))
        if any(name not in small for name in used):
            segments.append(Segment(node))
        segment = segments[-1]
        segment.uses += [name for name in used if name not in segment.uses]
        segment.nodes.append(node)
        segment.seconds += estimated_seconds(node)
        segment.workspace = max(segment.workspace, live[node])
    for param in read_once(segments):
        using = [index for index, segment in enumerate(segments) if param in segment.uses]
        for segment in segments[using[0] : using[-1] + 1]:
            segment.uses += [param] if param not in segment.uses else []
    output = next(node for node in graph.nodes if node.op == "output")
    for source in output.all_input_nodes:  # a parameter that the graph returns is used until the graph's end
        segments[-1].uses += [name for name in roots.get(source, ()) if name not in segments[-1].uses]
    return Segments(params, segments, roots)


#: A parameter that more segments of a graph use (a recurrence, a layer that is applied repeatedly) is read once and stays
#: from its first to its last use, because each read breaks fusion and repeats the computations on the parameter.
MOST_READS = 4


def read_once(segments: Iterable[Segment]) -> set[str]:
    uses = Counter(param for segment in segments for param in segment.uses)
    return {param for param, count in uses.items() if count > MOST_READS}


def _gathered_param(gather: fx.Node) -> GatheredParam:
    shape, dtype = gather.args[2], gather.args[3] if len(gather.args) > 3 else None
    return GatheredParam(name_of(gather), tuple(shape), dtype or gather.meta["val"].dtype)  # type: ignore[arg-type]


def _counted_by_name(graph: fx.Graph, roots: dict[fx.Node, tuple[str, ...]]) -> list[fx.Node]:
    """Values that the planner counts separately and not as workspace: gathered parameters, gradients, and the outputs."""
    storage = storages(graph)
    found = [node for node in roots if storage[node].target is GATHER]
    for node in graph.nodes:
        if node.target is REDUCE:
            found += [source for source in node.all_input_nodes if source is node.args[0]]
        elif node.op == "output":
            found += node.all_input_nodes
    return found


def small_params(params: Iterable[GatheredParam]) -> set[str]:
    """Small parameters, which begin no segment."""
    all_params = list(params)
    largest = max((param.bytes for param in all_params), default=0)
    return {p.name for p in all_params if p.bytes <= SMALL_BYTES and p.bytes * SMALL_PART <= largest}


def structure_hash(graphs: Iterable[Segments]) -> str:
    digest = hashlib.sha256()
    for segments in graphs:
        digest.update(repr(segments.structure).encode())
        digest.update(repr(sorted((p.name, p.shape, str(p.dtype)) for p in segments.params.values())).encode())
    return digest.hexdigest()[:16]


def _bytes_touched(node: fx.Node) -> int:
    if is_view(node):
        return 0
    read = sum(tensor_bytes(source.meta.get("val")) for source in node.all_input_nodes)
    return read + tensor_bytes(node.meta.get("val"))


def estimated_seconds(node: fx.Node) -> float:
    """From the node's FLOPs and bytes. Once steps are measured, only the proportions matter."""
    if node.op != "call_function" or is_view(node):
        return 0.0
    target = node.target
    flops = 0.0
    if isinstance(target, torch._ops.OpOverload):
        count = flop_counter.flop_registry.get(target.overloadpacket)
        if count is not None and not _symbolic(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            flops = float(count(*args, **kwargs, out_val=node.meta.get("val")))
    return flops / FLOPS_PER_SECOND + _bytes_touched(node) / BYTES_PER_SECOND


def _symbolic(node: fx.Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(v, torch.Tensor) and any(not isinstance(s, int) for s in v.shape) for v in values)
