"""The reads of a compiled graph. Their order is fixed at compilation, whatever the plan; a schedule says what the runtime
does at each.
"""

from __future__ import annotations

import copy
import dataclasses

from torch import fx

from deepcompile.compiler.segments import GATHER, Segments, cut, name_of, read_once, small_params


@dataclasses.dataclass(frozen=True)
class GraphRead:
    """One read in a compiled graph, before a segment."""

    segment: int
    param: str


def reads_of(segments: Segments) -> list[GraphRead]:
    """The reads of a compiled graph in its order: a large parameter at the beginning of each segment that uses it (only of
    the first, if many do), small parameters once, at the graph's beginning. A read in the middle of a segment would
    prevent fusion across it.
    """
    small, once = small_params(segments.params.values()), read_once(segments.segments)
    uses = [(index, param) for index, segment in enumerate(segments.segments) for param in segment.uses]
    reads: dict[object, GraphRead] = {param: GraphRead(0, param) for _, param in uses if param in small}
    for index, param in uses:
        if param not in small:
            reads.setdefault(param if param in once else (index, param), GraphRead(index, param))
    return list(reads.values())


def with_reads(old: fx.Graph) -> fx.Graph:
    """A new graph that computes the same and reads parameters where :func:`reads_of` says. Values computed from parameters
    alone are computed again after each read, at their first use.
    """
    segments = cut(old)
    starts = {segment.first: index for index, segment in enumerate(segments.segments) if segment.first is not None}
    gathers = {name_of(node): node for node in old.nodes if node.target is GATHER}
    reads = reads_of(segments)
    new = fx.Graph()
    new._codegen = copy.deepcopy(old._codegen)
    environment: dict[fx.Node, fx.Node] = {}
    current: dict[str, fx.Node] = {}  # parameter -> what its last read returned

    def value(node: fx.Node) -> fx.Node:
        if node not in environment:  # computed only from parameters: computed here, from the last read
            assert node in segments.roots, node
            if node.target is GATHER:
                return current[name_of(node)]
            environment[node] = new.node_copy(node, value)
        return environment[node]

    def begin(index: int) -> None:
        for read in reads:
            if read.segment == index:
                gather = gathers[read.param]
                node = new.call_function(GATHER, (environment[gather.args[0]], *gather.args[1:]))  # type: ignore[index]
                node.meta = {**gather.meta, "deepcompile_pinned": True}
                current[read.param] = node
                for derived, params in segments.roots.items():
                    if read.param in params:
                        environment.pop(derived, None)

    begun = False
    for node in old.nodes:
        if node in segments.roots:
            continue
        if node.op not in ("placeholder", "get_attr") and not begun:
            begun = True
            begin(0)
        if node in starts:
            begin(starts[node])
        environment[node] = new.node_copy(node, value)
    new.lint()
    return new


def slots_of(segments: Segments) -> list[str]:
    """The parameters of a compiled graph in the order of the numbers that stand for them in its schedule. (Equal layers may
    share a graph, so each call passes the shards that the numbers stand for.)
    """
    return list(segments.params)
