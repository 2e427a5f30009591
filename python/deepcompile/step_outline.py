"""What the planner knows of a step's graphs when the graphs themselves are gone, or were never there: a result from a
compiler's cache comes without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from deepcompile.segments import Segments, cut
from deepcompile.step_graph import BACKWARD, FORWARD, Saved, saved_buffers


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


__all__ = ["StepOutline"]
