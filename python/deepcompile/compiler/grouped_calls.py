"""Merges calls in graphs of a single rank.

With ``gather_at_one_rank`` the operators run on one rank, too: a gather returns the parameter itself, and a reduction only
hands the gradient over, so the host spends more time on the calls than on their work. So all gathers of a graph become one
call at its beginning, and reductions are called some at a time (not once at the end: gradients that are added to earlier
ones would wait that long).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import fx

from deepcompile.compiler.segments import GATHER, REDUCE

GATHER_ALL = torch.ops.dc.gather_shards.default
REDUCE_ALL = torch.ops.dc.reduce_shards.default

#: Operators that change the shape and keep the order of the elements.
_RESHAPES = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze.default,
)

#: Gradients in one call.
GRADIENTS_A_CALL = 16


def group_calls(graph: fx.Graph) -> None:
    _gather_together(graph)
    _reduce_together(graph)
    graph.lint()


def _by_graph(nodes: list[fx.Node], argument: int) -> Iterable[list[fx.Node]]:
    """``nodes`` by the graph id in their ``argument``: a compiled graph may read the parameters of several engines."""
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(node.args[argument], []).append(node)
    return found.values()


def _gather_together(graph: fx.Graph) -> None:
    # A gather that casts makes a copy; such gathers stay at their use, so that the copies are not held from the beginning.
    same = [n for n in graph.nodes if n.target is GATHER and n.meta["val"].dtype == n.args[0].meta["val"].dtype]
    for gathers in _by_graph(same, 1):
        if len(gathers) > 1:
            _gather_at_the_beginning(graph, gathers)


def _gather_at_the_beginning(graph: fx.Graph, gathers: list[fx.Node]) -> None:
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr") and n not in gathers)
    shapes: list[Any] = [node.args[2] for node in gathers]
    arguments = ([node.args[0] for node in gathers], gathers[0].args[1], list(chain(*shapes)), [len(s) for s in shapes])
    with graph.inserting_before(first):
        together = graph.call_function(GATHER_ALL, arguments)
        together.meta = {**gathers[0].meta, "val": [node.meta["val"] for node in gathers]}
        for index, node in enumerate(gathers):
            gathered = graph.call_function(operator.getitem, (together, index))
            gathered.meta = dict(node.meta)
            node.replace_all_uses_with(gathered)
    for node in gathers:
        graph.erase_node(node)


def _reduce_together(graph: fx.Graph) -> None:
    every = [node for node in graph.nodes if node.target is REDUCE and not node.users]
    groups = (
        one[begin : begin + GRADIENTS_A_CALL]
        for one in _by_graph(every, 2)
        for begin in range(0, len(one), GRADIENTS_A_CALL)
    )
    for group in groups:
        donated = [int(len(node.args) > 3 and bool(node.args[3])) for node in group]
        with graph.inserting_before(group[-1]):
            gradients = [_without_views(node.args[0]) for node in group]
            together = graph.call_function(
                REDUCE_ALL, (gradients, [n.args[1] for n in group], group[0].args[2], donated)
            )
            together.meta = {**group[-1].meta, "val": None}
        for node in group:
            graph.erase_node(node)


def _without_views(gradient: Any) -> fx.Node:
    """The tensor that ``gradient`` is a reshaped view of. A reduction accepts any shape, and the memory of a view could not
    be donated because its base is still referenced.
    """
    while gradient.target in _RESHAPES and isinstance(gradient.args[0], fx.Node):
        gradient = gradient.args[0]
    return gradient  # type: ignore[no-any-return]
