"""What the planner knows of a step's graphs when the graphs themselves are gone, or were never there: a result from a
compiler's cache comes without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from deepcompile.compiler.live_memory import storages, tensor_bytes
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segments, cut


@dataclasses.dataclass(frozen=True)
class Saved:
    """What one segment of the forward makes and one of the backward reads last, together."""

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
        """``fuses``: the graphs are for a compiler that keeps no memory for what is read element by element."""
        graphs = {FORWARD: cut(forward.graph, fuses)}
        saved: list[Saved] = []
        if backward is not None:
            graphs[BACKWARD] = cut(backward.graph, fuses)
            saved = saved_buffers(graphs[FORWARD], graphs[BACKWARD], backward)
        return StepOutline({phase: segments.without_nodes({}) for phase, segments in graphs.items()}, saved)

    def renamed(self, names: Mapping[str, str]) -> StepOutline:
        """A copy, with other names of the parameters. Those that ``names`` lacks keep theirs."""
        graphs = {phase: segments.without_nodes(names) for phase, segments in self.graphs.items()}
        return StepOutline(graphs, list(self.saved))


def saved_buffers(forward: Segments, backward: Segments, backward_module: fx.GraphModule) -> list[Saved]:
    """What the forward saves for the backward: placeholders of the backward that a node of the forward has the name of.
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
