"""Turns recorded operations into the planner's step, and its plan into the schedule of a replay.

A *cycle* is a forward and its backward. Its *reads* are the calls that may need a collective: every read of a parameter that
is released after use, the first read of one that stays gathered, and the entry of a leaf module. Reads of large parameters
begin segments, as in traced graphs (:mod:`deepcompile.compiler.segments`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deepcompile.compiler.segments import BACKWARD, FORWARD, GatheredParam, Segment, Segments, small_params
from deepcompile.planning.step_graph import first_nodes
from deepcompile.planning.step_plan import Key, ScheduledEvent, placed_gathers
from deepcompile.planning.step_planner import Step
from deepcompile.replay.recorded_ops import ModelRecord, ParamRecord, RecordedOp, RecordedOps

#: Nanoseconds. A release so soon after the beginning of a segment belongs to the segment before: the interpreter frees a
#: tensor a little after its last use.
_PROMPT = 50_000

_PROGRAM = ("gather", "read", "prefetch", "wait", "reduce", "end")


class Read(NamedTuple):
    """One call of the program that may need a collective."""

    param: str
    dtype: str
    kind: str  # "read", or "group": the entry of a leaf module whose first parameter this is
    backward: bool


@dataclasses.dataclass
class Cycle:
    reads: list[Read]
    places: list[tuple[str, int]]  # phase and segment of each read
    graphs: dict[str, Segments]
    seconds: dict[str, list[float]]  # of each segment, without communication
    spent: float  # seconds in communication
    calls: list[str]  # the phase of each compiled graph that ran, in order
    call_of: list[int]  # for each read, how many compiled graphs had begun

    @property
    def key(self) -> str:
        """The same for cycles that read the same."""
        return reads_key(self.reads)


def reads_key(reads: Iterable[Read]) -> str:
    return hashlib.sha256(repr([tuple(read) for read in reads]).encode()).hexdigest()[:16]


def cycles_of(ops: RecordedOps, *, releases: bool = True) -> list[Cycle]:
    """The cycles of a recording, in order. ``releases``: a parameter counts as used until its release; otherwise only where
    it is read. (In a recorded replay releases come later than the last use.)
    """
    found = []
    current: list[RecordedOp] = []
    for op in ops:
        current.append(op)
        if op.kind == "end":
            found.append(_cycle(current, ops.model, releases))
            current = []
    return found


def _cycle(ops: Sequence[RecordedOp], model: ModelRecord, releases: bool) -> Cycle:
    records = {param.name: param for param in model.params}
    read_params = {op.param for op in ops if op.kind in ("gather", "read", "prefetch")}
    gathered = {name: GatheredParam(name, p.shape, getattr(torch, p.dtype)) for name, p in records.items()}
    small = small_params(gathered[name] for name in read_params)
    builder = _Builder(records, small)
    for op in ops:
        builder.add(op)
    if releases:
        builder.extend_to_releases(ops)
    graphs, seconds = {}, {}
    for phase in (FORWARD, BACKWARD):
        segments = [made.segment for made in builder.made if made.phase == phase]
        used = dict.fromkeys(use for segment in segments for use in segment.uses)
        graphs[phase] = Segments({name: gathered[name] for name in used}, segments, {})
        seconds[phase] = [made.nanoseconds * 1e-9 for made in builder.made if made.phase == phase]
    return Cycle(builder.reads, builder.places, graphs, seconds, builder.spent * 1e-9, builder.calls, builder.call_of)


@dataclasses.dataclass
class _Made:
    phase: str
    segment: Segment
    start: int
    nanoseconds: int = 0


class _Builder:
    """Goes through the operations of one cycle."""

    def __init__(self, records: dict[str, ParamRecord], small: set[str]) -> None:
        self._records, self._small = records, small
        self.made: list[_Made] = []
        self.reads: list[Read] = []
        self.places: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self.call_of: list[int] = []
        self.spent = 0
        self._settled: set[str] = set()  # persistent parameters that were read
        self._group_start = -1
        self._busy_until = 0

    def _begin(self, phase: str, start: int) -> None:
        self.made.append(_Made(phase, Segment(None), start))

    def _number(self) -> int:
        phase = self.made[-1].phase
        return sum(made.phase == phase for made in self.made) - 1

    def add(self, op: RecordedOp) -> None:
        if op.kind == "call":
            self.calls.append(op.phase)
        if op.kind not in _PROGRAM:
            return
        if not self.made:
            self._begin(FORWARD, op.start)
            self._busy_until = op.start
        self.made[-1].nanoseconds += max(0, op.start - self._busy_until)  # what the program did since
        if op.phase == BACKWARD and self.made[-1].phase == FORWARD:
            self._begin(BACKWARD, op.start)
        if op.kind in ("gather", "read", "prefetch"):
            self._read(op)
        elif op.kind == "reduce":
            for made in self.made:
                if op.param in made.segment.grads:
                    made.segment.grads.remove(op.param)  # only the last one completes the gradient
            self.made[-1].segment.grads.append(op.param)
        self.spent += max(0, op.end - max(op.start, self._busy_until))
        self._busy_until = max(self._busy_until, op.end)

    def _read(self, op: RecordedOp) -> None:
        record = self._records[op.param]
        first_of_group = op.kind == "prefetch" and op.start != self._group_start
        if op.kind == "prefetch":
            self._group_start = op.start
        followed = first_of_group or (
            op.kind != "prefetch" and not record.leaf and not (record.persistent and op.param in self._settled)
        )
        if followed and (first_of_group or op.param not in self._small):
            self._begin(op.phase, op.start)
        if record.leaf and op.kind != "prefetch":
            return  # reads inside a leaf module depend on the rank's routing
        if followed:
            kind = "group" if first_of_group else "read"
            self.reads.append(Read(op.param, op.dtype, kind, op.phase == BACKWARD))
            self.places.append((self.made[-1].phase, self._number()))
            self.call_of.append(len(self.calls))
        if record.persistent:
            self._settled.add(op.param)
        uses = self.made[-1].segment.uses
        if op.param not in uses:
            uses.append(op.param)

    def extend_to_releases(self, ops: Sequence[RecordedOp]) -> None:
        starts = [made.start for made in self.made]
        opened: dict[str, int] = {}
        for op in ops:
            if op.kind in ("gather", "read") and op.param not in opened:
                opened[op.param] = op.start
            elif op.kind == "release" and op.param in opened:
                begin = opened.pop(op.param)
                record = self._records[op.param]
                if record.persistent or record.leaf:
                    continue
                for index, made in enumerate(self.made):
                    inside = starts[index] > begin and starts[index] + _PROMPT < op.start
                    if inside and op.param not in made.segment.uses:
                        made.segment.uses.append(op.param)


# -- plan to schedule -----------------------------------------------------------------------------------------------------


def schedule(cycle: Cycle, step: Step, keys: dict[str, Key]) -> list[ScheduledEvent]:
    """What a replay does at each read: which gathers to start before it, and whether to keep the copy after it. ``keys``:
    the id and dtype of each parameter, by name.
    """
    assert step.plan is not None
    gathers, first = placed_gathers(step.plan.planned, cycle.graphs), first_nodes(cycle.graphs)
    where = [first[phase] + segment for phase, segment in cycle.places]
    starts: list[list[list[Key]]] = [[] for _ in cycle.reads]
    for begin, params in gathers.launches:
        at = next((index for index, place in enumerate(where) if place >= begin), None)
        if at is not None:
            starts[at].append([keys[param] for param in params])
    result: list[ScheduledEvent] = []
    for index, read in enumerate(cycle.reads):
        later = next((j for j in range(index + 1, len(where)) if cycle.reads[j].param == read.param), None)
        keep = later is not None and any(
            begin <= where[index] and where[later] < end
            for begin, end in gathers.intervals.get(
                read.param, [[0, gathers.nodes]]
            )  # without a gather: there all the time
        )
        dtype = getattr(torch, read.dtype)
        result.append(((keys[read.param][0], dtype, read.kind, read.backward), keep, starts[index], ((), (), ())))
    return result


def across_graphs(cycle: Cycle, scheduled: Sequence[ScheduledEvent]) -> tuple[int, int]:
    """How many gathers are started in one compiled graph and read in another, and how many copies one keeps for another."""
    started = kept = 0
    keys = [event[:2] for event, *_ in scheduled]

    def crosses(index: int, key: Key, begin: int) -> bool:
        reads = (cycle.call_of[later] for later in range(begin, len(keys)) if keys[later] == key)
        return next(reads, cycle.call_of[index]) != cycle.call_of[index]

    for index, (_, keep, launches, _) in enumerate(scheduled):
        started += sum(crosses(index, key, index) for launch in launches for key in launch)
        kept += keep and crosses(index, keys[index], index + 1)
    return started, kept
