"""What a step needs by the shapes of the batch, and the same for all ranks, whose batches may have other shapes.

Ranks plan alike, so what they plan from must be alike. Bytes are the largest of any rank: a plan then fits on every one.
Estimated times are medians.
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
    """Of the graphs of one step, on one rank or on all."""

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
        """The graphs' segments need what is said here from now on."""
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
    """Of the same graphs for several batches: of other ranks, or of other steps."""
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
