"""How much memory the values of a graph take while it runs, except what the planner counts separately: gathered parameters,
values saved for the backward, and gradients in flight.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import fx

#: Operators whose result lies in the memory of their first argument.
_VIEWS = {"view", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "alias", "split"}
_VIEWS |= {"_unsafe_view", "reshape", "detach", "split_with_sizes", "unbind", "as_strided", "diagonal"}
#: Operators that write into a copy of their first argument. A compiler writes into the argument itself if that is its last
#: use.
_WRITES = {"index_put", "_unsafe_index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"}
_WRITES |= {"slice_scatter", "select_scatter"}
#: Reductions that read their input element by element, so that a compiler can fuse the computation of the input into them.
_READS_BY_ELEMENT = {"sum", "mean", "amax", "amin", "any", "var", "var_mean", "prod", "argmax", "argmin"}


def number(value: Any) -> int:
    """A size as a number; of a symbolic size the hint, or 64 without one."""
    return value if isinstance(value, int) else int(value.node.hint) if value.node.has_hint() else 64


def tensor_bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(number(size) for size in value.shape) * value.dtype.itemsize


def is_view(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and target._opname in _VIEWS


def storages(graph: fx.Graph, spared: Container[fx.Node] | None = None) -> dict[fx.Node, fx.Node]:
    """For each node the node that allocated the memory of its value. With ``spared``, as in compiled code, where in-place
    variants of operators overwrite values at their last use, except the values in ``spared``.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        lies_there = is_view(node) or (spared is not None and source not in spared and _writes_over(node))
        found[node] = found[source] if lies_there and isinstance(source, fx.Node) else node
    return found


def _writes_over(node: fx.Node) -> bool:
    """Whether a compiler writes the result over the first argument."""
    if getattr(node.target, "_opname", "") not in _WRITES:
        return False
    source, *others = node.args
    if not isinstance(source, fx.Node) or source.op != "call_function" or is_view(source) or len(source.users) > 1:
        return False
    as_large = tensor_bytes(source.meta.get("val")) == tensor_bytes(node.meta.get("val"))
    return as_large and source not in torch.utils._pytree.tree_leaves(others)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_inlined(node: fx.Node) -> bool:
    """Whether a compiler that fuses computes the node inside all its readers, and so keeps no memory for it."""

    def reads_by_element(reader: fx.Node) -> bool:
        if is_view(reader):
            return all(reads_by_element(user) for user in reader.users)
        return _is_pointwise(reader) or getattr(reader.target, "_opname", "") in _READS_BY_ELEMENT

    return _is_pointwise(node) and bool(node.users) and all(reads_by_element(user) for user in node.users)


def live_bytes(graph: fx.Graph, elsewhere: Iterable[fx.Node], fuses: bool) -> Mapping[fx.Node, int]:
    """By node, the bytes of the values that are alive while it runs, its own result included, without inputs and without
    the nodes in ``elsewhere``. ``fuses``: the compiler inlines values that are read element by element.
    """
    elsewhere = set(elsewhere)
    storage = storages(graph, elsewhere if fuses else None)
    counted = {node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    counted -= {storage[node] for node in elsewhere}
    inlined = {node for node in counted if fuses and _is_inlined(node)}
    # A node that reads an inlined value really reads the inputs of that value.
    reads: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mine: set[fx.Node] = set()
        for source in node.all_input_nodes:
            base = storage[source]
            mine |= reads[base] if base in inlined else {base}
        reads[node] = mine
        if node not in inlined:
            for base in mine:
                last[base] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for base, reader in last.items():
        ends.setdefault(reader, []).append(base)
    result: dict[fx.Node, int] = {}
    live = 0
    for node in graph.nodes:
        own = storage[node] is node and node in counted and node not in inlined
        live += tensor_bytes(node.meta.get("val")) if own else 0
        result[node] = live
        done = [base for base in ends.get(node, ()) if base in counted and base not in inlined]
        if own and node not in last:
            done.append(node)  # it has no reader
        live -= sum(tensor_bytes(base.meta.get("val")) for base in done if storage[base] is base)
    return result
