"""What the planner needs of a step's graphs, without the graphs themselves: a result from a compiler's cache has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from deepcompile.compiler.live_memory import storages, tensor_bytes
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segments, cut


@dataclasses.dataclass(frozen=True)
class Saved:
    """The saved values that one segment of the forward makes and one segment of the backward reads last, added up."""

    made_in: int
    read_in: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StepOutline:
    """The graphs of one step, cut, without their nodes. It can be pickled."""

    graphs: Mapping[str, Segments]  # by phase
    saved: Sequence[Saved]

    @staticmethod
    def of(forward: fx.GraphModule, backward: fx.GraphModule | None, fuses: bool) -> StepOutline:
        """``fuses``: the compiler inlines values that are read element by element, so they take no memory."""
        graphs = {FORWARD: cut(forward.graph, fuses)}
        saved: list[Saved] = []
        if backward is not None:
            graphs[BACKWARD] = cut(backward.graph, fuses)
            saved = saved_buffers(graphs[FORWARD], graphs[BACKWARD], backward)
        return StepOutline({phase: segments.without_nodes({}) for phase, segments in graphs.items()}, saved)

    def renamed(self, names: Mapping[str, str]) -> StepOutline:
        """A copy with parameters renamed by ``names``; parameters that it lacks keep their names."""
        graphs = {phase: segments.without_nodes(names) for phase, segments in self.graphs.items()}
        return StepOutline(graphs, list(self.saved))


def saved_buffers(forward: Segments, backward: Segments, backward_module: fx.GraphModule) -> list[Saved]:
    """What the forward saves for the backward: the placeholders of the backward that are named after a node of the forward.
    Views of the same memory are counted once.
    """
    made = {node.name: node for segment in forward.segments for node in segment.nodes}
    made_in = {node: index for index, segment in enumerate(forward.segments) for node in segment.nodes}
    storage = storages(next(iter(made_in)).graph) if made_in else {}
    read_in: dict[fx.Node, int] = {}
    for index, segment in enumerate(backward.segments):
        read_in |= {source: index for node in segment.nodes for source in node.all_input_nodes}
    last: dict[fx.Node, int] = {}
    for node in backward_module.graph.nodes:
        if node.op == "placeholder" and node.name in made and node in read_in:
            base = storage[made[node.name]]
            last[base] = max(read_in[node], last.get(base, 0))
    found: dict[tuple[int, int], int] = {}
    for base, read in last.items():
        size = tensor_bytes(base.meta.get("val"))
        if size and base in made_in:
            place = (made_in[base], read)
            found[place] = found.get(place, 0) + size
    return [Saved(*place, size) for place, size in sorted(found.items())]
