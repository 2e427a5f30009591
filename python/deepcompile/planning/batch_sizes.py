"""What a step needs that depends on the batch's shapes, combined over ranks, whose batches may have other shapes.

All ranks must make the same plan, so they must plan from the same numbers: for bytes the largest of all ranks, so that the
plan fits on each; for estimated times the median.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence

from deepcompile.compiler.segments import Segments
from deepcompile.compiler.step_outline import Saved


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Times and bytes of the graphs of one step, for one batch or combined."""

    seconds: Mapping[str, Sequence[float]]  # estimated, of each segment, by phase
    workspace: Mapping[str, Sequence[int]]  # bytes, of each segment, by phase
    saved: Mapping[tuple[int, int], int]  # bytes, by the segments that make them and read them last

    @staticmethod
    def of(graphs: Mapping[str, Segments], saved: Sequence[Saved]) -> BatchSizes:
        return BatchSizes(
            {phase: [segment.seconds for segment in cut.segments] for phase, cut in graphs.items()},
            {phase: [segment.workspace for segment in cut.segments] for phase, cut in graphs.items()},
            {(one.made_in, one.read_in): one.bytes for one in saved},
        )

    def saved_buffers(self) -> list[Saved]:
        return [Saved(*segments, size) for segments, size in sorted(self.saved.items())]

    def put_into(self, graphs: Mapping[str, Segments]) -> None:
        """Sets the workspaces of the graphs' segments to these."""
        for phase, sizes in self.workspace.items():
            for segment, size in zip(graphs[phase].segments, sizes, strict=True):
                segment.workspace = size

    @property
    def text(self) -> str:
        saved = [[*segments, size] for segments, size in sorted(self.saved.items())]
        return json.dumps([self.seconds, self.workspace, saved])

    @staticmethod
    def parse(text: str) -> BatchSizes:
        seconds, workspace, saved = json.loads(text)
        return BatchSizes(seconds, workspace, {(made, read): size for made, read, size in saved})


def over_all(sizes: Sequence[BatchSizes]) -> BatchSizes:
    """Combines the sizes of the same graphs for several batches, of several ranks or steps."""
    phases = sizes[0].workspace
    saved: dict[tuple[int, int], int] = {}
    for one in sizes:
        for segments, size in one.saved.items():
            saved[segments] = max(size, saved.get(segments, 0))
    return BatchSizes(
        {p: [statistics.median(of) for of in zip(*(one.seconds[p] for one in sizes), strict=True)] for p in phases},
        {p: [max(of) for of in zip(*(one.workspace[p] for one in sizes), strict=True)] for p in phases},
        saved,
    )
