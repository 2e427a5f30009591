"""Measures the first iterations and plans again from the measurements, the same on all ranks.

No step is run only to measure: the runtime records when each parameter was read and when each collective ran, so measuring
needs no more memory than training does.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepcompile import plan as planner
from deepcompile.compiler.reads import GraphRead, reads_of
from deepcompile.compiler.segments import BACKWARD, FORWARD
from deepcompile.planning.report import one_line
from deepcompile.planning.step_planner import Step, StepPlanner
from deepcompile.runtime.step_trace import TraceEntry, TraceReader
from deepcompile.sharding.sharding import Sharding

_log = logging.getLogger("deepcompile")


@dataclasses.dataclass
class Iteration:
    """One forward and backward, in nanoseconds of the steady clock."""

    forward_start: int
    forward_end: int = 0
    backward_start: int = 0
    backward_end: int = 0
    entries: list[TraceEntry] = dataclasses.field(default_factory=list)


class Profile:
    """Collects iterations until there are enough, then plans. The calls come from the engine."""

    def __init__(self, sharding: Sharding, iterations: int) -> None:
        self._sharding = sharding
        self._wanted = iterations
        self._seen = 0
        self._current: Iteration | None = None
        self._reader: TraceReader | None = None  # of the iteration that runs
        self._finished: list[Iteration] = []
        self._updates: list[int] = []  # nanoseconds
        self.done = iterations == 0
        self.why_not = "" if iterations else "profile_steps is 0"
        #: True if the first step ran in several compiled graphs, on all ranks.
        self.several_graphs = False

    @property
    def iterations(self) -> int:
        return self._wanted

    @property
    def _recording(self) -> bool:
        return not self.done and self._seen > 0  # in the first iteration compilers run

    def begin_step(self) -> None:
        if not self.done and self._seen == 0:
            self._sharding.calls = []

    def end_step(self) -> None:
        calls, self._sharding.calls = self._sharding.calls, None
        if calls is not None and self._sharding.world > 1:
            self.several_graphs = self._sharding.planner.in_several_graphs(calls, self._seen)

    def failed(self, error: Exception) -> None:
        pass

    def line(self, changed: bool) -> str:
        return one_line(self._sharding, changed, self.why_not)

    def _now(self) -> int:
        """The time when the device has finished all enqueued work. Blocks, so it is called in measured iterations only."""
        if self._sharding.runtime.device.type == "cuda":
            torch.cuda.synchronize(self._sharding.runtime.device)
        return time.monotonic_ns()

    def start_forward(self) -> None:
        if self._recording:
            self._stop_reading()
            self._reader = TraceReader(self._sharding.runtime)
            self._current = Iteration(self._now())

    def end_forward(self) -> None:
        if self._current is not None:
            self._current.forward_end = self._now()

    def start_backward(self) -> None:
        if self._current is not None:
            self._current.backward_start = self._now()

    def end_backward(self) -> None:
        if self._current is not None:
            self._current.backward_end = self._now()
            assert self._reader is not None
            self._current.entries = self._reader.stop().entries
            self._reader = None
            self._finished.append(self._current)
            self._current = None
        if not self.done:
            self._seen += 1

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.drop()
            self._reader = None

    def again(self) -> None:
        """Starts measuring again. The first iteration is left out, as in the first profile."""
        self.done, self._seen = False, 0
        self._finished.clear()
        self._updates.clear()

    def end_update(self, started: int) -> None:
        """An optimizer step that began at ``started`` has ended."""
        if self._finished and not self.done:  # the first one makes the optimizer's state
            self._updates.append(self._now() - started)

    def ready(self) -> bool:
        """True once, on all ranks in the same iteration."""
        return not self.done and self._seen > self._wanted

    def plan(self) -> bool:
        """Plans from the measurements. Every rank calls it at the same point. True when the plan changed."""
        self.done = True
        self._stop_reading()
        steps: StepPlanner = self._sharding.planner
        step = steps.training_step()
        own: Any = None
        if step is None or step.plan is None:
            self.why_not = "no single planned graph holds the whole step" if step is None else step.why_not
        else:
            own = self._measure(step)
            self.why_not = "" if own else "the iterations did not gather as planned"
        by_rank: list[Any] = [None] * self._sharding.world
        dist.all_gather_object(by_rank, own, group=self._sharding.group)
        self._finished.clear()
        if step is None or any(one is None for one in by_rank):
            if not self.why_not:
                self.why_not = "another rank could not measure"  # then all ranks keep the plan they have
            return False
        seconds, update_seconds, machine = over_ranks(by_rank, steps.machine)
        return steps.replan(step, seconds, update_seconds, machine)

    def _measure(self, step: Step) -> dict[str, Any] | None:
        assert step.plan is not None
        names = self._sharding.names
        inline = self._sharding.collectives_stop_compute
        samples: dict[str, list[list[float]]] = {FORWARD: [], BACKWARD: []}
        for iteration in self._finished:
            for phase, begin, end in (
                (FORWARD, iteration.forward_start, iteration.forward_end),
                (BACKWARD, iteration.backward_start, iteration.backward_end),
            ):
                entries = [entry for entry in iteration.entries if begin <= entry.start <= end]
                found = segment_seconds(
                    reads_of(step.graphs[phase]),
                    [(names[e.id], e.start, e.end) for e in entries if e.kind == "read"],
                    begin,
                    end,
                    step.seconds[phase],
                    [(e.start, e.end) for e in entries if inline and e.kind in ("gather", "reduction")],
                )
                if found is None:
                    return None
                samples[phase].append(found)
        if not self._finished:
            return None
        seconds = {
            phase: [statistics.median(column) for column in zip(*rows, strict=True)] for phase, rows in samples.items()
        }
        entries = [entry for iteration in self._finished for entry in iteration.entries]
        return {
            "seconds": seconds,
            "update": statistics.median(self._updates) * 1e-9 if self._updates else 1e-6,
            "gathers": by_size((e.bytes, e.end - e.start) for e in entries if e.kind == "gather"),
            "reductions": by_size((e.bytes, e.end - e.start) for e in entries if e.kind == "reduction"),
        }


def over_ranks(
    by_rank: Sequence[Mapping[str, Any]], machine: planner.Machine
) -> tuple[dict[str, list[float]], float, planner.Machine]:
    """Combines the measurements of all ranks: the median time of each segment and of the optimizer, and ``machine`` with
    the measured curves.
    """
    seconds = {
        phase: [statistics.median(one["seconds"][phase][i] for one in by_rank) for i in range(len(values))]
        for phase, values in by_rank[0]["seconds"].items()
    }
    update_seconds = statistics.median(one["update"] for one in by_rank)
    gathers, reductions = (_fastest(one[kind] for one in by_rank) for kind in ("gathers", "reductions"))
    return seconds, update_seconds, measured_machine(machine, gathers, reductions)


def segment_seconds(
    reads: Sequence[GraphRead],
    events: list[tuple[str, int, int]],
    begin: int,
    end: int,
    estimates: list[float],
    collectives: Iterable[tuple[int, int]] = (),
) -> list[float] | None:
    """The compute time of each segment: from its first read to the first read of the next segment, minus the time spent in
    reads (compilers may move a read down to the first use) and in ``collectives`` (start, end) on the same thread. A segment
    without reads shares a measurement with the one before; it is divided in proportion to ``estimates``. None if the
    ``events`` (name, start, end) are not the reads of the graph.
    """
    events = sorted(events, key=lambda event: event[1])
    if [event[0] for event in events] != [read.param for read in reads]:
        return None
    starts: dict[int, int] = {}  # of the segments that have a read
    for read, (_, start, _) in zip(reads, events, strict=True):
        starts.setdefault(read.segment, start)
    starts[0] = begin  # the time before the first read counts as part of the first segment
    waits = _union([*((start, stop) for _, start, stop in events), *collectives])
    result = [0.0] * len(estimates)
    measured = sorted(starts)
    for first, following in zip(measured, [*measured[1:], len(estimates)], strict=True):
        stop = starts.get(following, end)
        waited = sum(max(0, min(b, stop) - max(a, starts[first])) for a, b in waits)
        span = max(0, stop - starts[first] - waited) * 1e-9
        group = range(first, following)
        total = sum(estimates[i] for i in group)
        for i in group:
            result[i] = span * (estimates[i] / total if total else 1 / len(group))
    return result


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of the intervals, as intervals that do not overlap."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def by_size(collectives: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Median seconds by bytes. ``collectives``: the bytes and the nanoseconds of each."""
    found: dict[int, list[int]] = {}
    for size, nanoseconds in collectives:
        if size > 0:
            found.setdefault(size, []).append(nanoseconds)
    return {size: statistics.median(times) * 1e-9 for size, times in found.items()}


def _fastest(curves: Iterable[dict[int, float]]) -> dict[int, float]:
    """For each size the least time of any rank. Ranks that arrive early also measure their wait for the last one."""
    best: dict[int, float] = {}
    for curve in curves:
        for size, seconds in curve.items():
            best[size] = min(seconds, best.get(size, seconds))
    return best


def measured_machine(
    machine: planner.Machine, gathers: dict[int, float], reductions: dict[int, float]
) -> planner.Machine:
    """``machine`` with the measured curves in place of its own. ``gathers``, ``reductions``: seconds by bytes."""
    return machine.replace(
        gather=_points(gathers) if gathers else None, reduce=_points(reductions) if reductions else None
    )


#: Points of a measured curve, at most.
_MOST_POINTS = 9


def _points(curve: Mapping[int, float]) -> list[tuple[int, int]]:
    """(bytes, nanoseconds), thinned out evenly. The ends are kept, because the curve is extrapolated from them."""
    points: list[tuple[int, int]] = []
    floor = 1
    for size in sorted(curve):
        floor = max(floor, round(curve[size] * 1e9))  # more bytes never take less
        points.append((size, floor))
    last = len(points) - 1
    if last < _MOST_POINTS:
        return points
    return [points[round(i * last / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
