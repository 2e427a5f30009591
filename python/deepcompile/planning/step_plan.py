"""Turns the planner's plan of a step into a plan for each compiled graph, and that into the schedule that the runtime
follows. The graphs themselves do not depend on the plan: they are compiled once, with their reads in a fixed order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping

import torch

from deepcompile import plan as planner
from deepcompile.compiler.reads import reads_of, slots_of
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segments, read_once, small_params
from deepcompile.planning.step_graph import ParamMetadata, first_nodes
from deepcompile.runtime.load import _C
from deepcompile.sharding.state_moves import Moves, Schedule, placed_moves, state_schedule


@dataclasses.dataclass(frozen=True)
class PlannedRead:
    """One stretch in which a graph reads a gathered copy, and whether the copy is kept for a later graph."""

    segment: int  # the copy is needed before it
    param: str
    keep: bool
    last: int  # the last segment that reads the copy


@dataclasses.dataclass(frozen=True)
class Launch:
    """A fused gather that is started before a segment."""

    segment: int
    params: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    reads: tuple[PlannedRead, ...]
    launches: tuple[Launch, ...]
    #: Of the optimizer's states, each before a segment.
    moves: tuple[tuple[int, Moves], ...] = ()


@dataclasses.dataclass
class StepPlan:
    """What all graphs of one step do, and the plan that this was derived from."""

    graphs: dict[str, GraphPlan]  # by phase
    planned: planner.Plan  # of the whole step, all micro-batches
    #: The plan of one micro-batch, given the parameters that stay over all micro-batches (``kept``); the graphs follow this
    #: one. The same as ``planned`` without accumulation.
    micro: planner.Plan
    micro_batches: int = 1  # of ``planned``
    #: Gathered once in a step and kept for all its micro-batches.
    kept: frozenset[str] = frozenset()
    #: Gradients that are reduced together, in the order of the reductions.
    reductions: tuple[tuple[str, ...], ...] = ()
    reductions_in_flight: int = 2  # at most, at any time
    #: Of the optimizer's states; None if the plan does not cover them.
    states: Schedule | None = None
    #: The schedules of the compiled graphs, by phase.
    schedules: dict[str, _C.StepSchedule] = dataclasses.field(default_factory=dict)

    @property
    def hash(self) -> str:
        return self.planned.hash if self.micro is self.planned else f"{self.planned.hash}+{self.micro.hash}"


@dataclasses.dataclass
class Gathers:
    """A plan's gathers by node number, and its reductions in order. Only the nodes of segments count, not the update's."""

    #: For each fused gather the node before which it starts, and its parameters.
    launches: list[tuple[int, tuple[str, ...]]]
    #: For each parameter the stretches [from, to) of nodes in which it is gathered.
    intervals: dict[str, list[list[int]]]
    #: Nodes of segments: all but those of the update.
    nodes: int
    reductions: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    reductions_in_flight: int = 1  # at any time, at most


def placed_gathers(planned: planner.Plan, graphs: Mapping[str, Segments]) -> Gathers:
    names = planned.graph.params
    found = Gathers([], {}, sum(len(segments.segments) for segments in graphs.values()))
    following = 0
    under_way: set[int | None] = set()  # reductions
    for kind, node, operation, items in planned.instructions:
        if node is not None:
            following = min(node + 1, found.nodes)
        elif kind == "gather":
            params = tuple(names[index] for _, index in items)
            found.launches.append((following, params))
            for param in params:
                found.intervals.setdefault(param, []).append([following, found.nodes])
        elif kind == "release":
            for _, index in items:
                found.intervals[names[index]][-1][1] = following
        elif kind == "reduce":
            found.reductions.append(tuple(names[index] for _, index in items))
            # (The runtime waits for an earlier reduction only after it has started the next one.)
            found.reductions_in_flight = max(found.reductions_in_flight, len(under_way))
            under_way.add(operation)
        elif kind == "wait":
            under_way.discard(operation)
    return found


def step_plan(
    planned: planner.Plan,
    graphs: Mapping[str, Segments],
    metadata: Mapping[str, ParamMetadata],
    kept: frozenset[str] = frozenset(),
    pieces: int = 0,
) -> StepPlan:
    """Splits the plan of one micro-batch by graph. ``pieces``: of the update, if the plan moves optimizer states; else 0."""
    gathers, first = placed_gathers(planned, graphs), first_nodes(graphs)
    reads: dict[str, list[PlannedRead]] = {phase: [] for phase in graphs}
    uses = {phase: _uses_of(segments) for phase, segments in graphs.items()}
    for phase, segments in graphs.items():
        for param in segments.params:
            used = uses[phase].get(param)
            if not used:
                continue
            if metadata[param].stays or param in kept:
                reads[phase].append(PlannedRead(used[0], param, True, used[-1]))
                continue
            base = first[phase]
            for begin, end in gathers.intervals.get(param, [[0, gathers.nodes]]):
                inside = [index for index in used if begin <= base + index < end]
                if inside:
                    later = phase == FORWARD and BACKWARD in graphs and end > base + len(segments.segments)
                    keep = later and param in uses[BACKWARD]
                    # A copy that the forward kept is there from the beginning.
                    reads[phase].append(PlannedRead(0 if begin < base else inside[0], param, keep, inside[-1]))
    moves: list[Moves] = []
    if pieces:
        moves = placed_moves(planned, [metadata[param].id for param in planned.graph.params])
    result = {}
    for phase, segments in graphs.items():
        base = first[phase]
        states = enumerate(moves[base : base + len(segments.segments)])
        own = [
            Launch(where - base, params)
            for where, params in gathers.launches
            if base <= where < base + len(segments.segments) and params
        ]
        together = _read_together(reads[phase], own)
        result[phase] = GraphPlan(
            tuple(together), tuple(_worthwhile(own, together)), tuple((index, one) for index, one in states if one)
        )
    found = StepPlan(result, planned, planned, kept=kept, reductions=tuple(gathers.reductions))
    found.reductions_in_flight = gathers.reductions_in_flight
    if pieces:
        found.states = state_schedule(moves, moves[gathers.nodes :])
    return found


def _uses_of(segments: Segments) -> dict[str, list[int]]:
    """The segments that use each parameter, in their order."""
    found: dict[str, list[int]] = {}
    for index, segment in enumerate(segments.segments):
        for param in segment.uses:
            found.setdefault(param, []).append(index)
    return found


def _read_together(reads: list[PlannedRead], launches: list[Launch]) -> list[PlannedRead]:
    """Moves reads up so that all parameters of one fused gather are read before the same segment. They arrive together
    anyway.
    """
    moved = {id(read): read for read in reads}
    reads_of_param: dict[str, list[PlannedRead]] = {}
    for read in reads:
        reads_of_param.setdefault(read.param, []).append(read)
    again: dict[str, int] = {}  # parameter -> the segment of its next launch after the current one
    for launch in reversed(launches):
        members = []
        for param in launch.params:
            limit = again.get(param, math.inf)
            mine = (read for read in reads_of_param.get(param, ()) if launch.segment <= read.segment < limit)
            members += list(itertools.islice(mine, 1))
        again |= dict.fromkeys(launch.params, launch.segment)
        if members:
            first = min(read.segment for read in members)
            for read in members:
                moved[id(read)] = dataclasses.replace(read, segment=first)
    return sorted(moved.values(), key=lambda read: read.segment)


def _worthwhile(launches: list[Launch], reads: list[PlannedRead]) -> list[Launch]:
    """``launches`` without those of one parameter that is read at the same place: the read itself gathers it."""
    at = {(read.segment, read.param) for read in reads}
    return [one for one in launches if len(one.params) > 1 or (one.segment, one.params[0]) not in at]


def without_keeping(plan: StepPlan, metadata: Mapping[str, ParamMetadata]) -> StepPlan:
    """The plan without copies kept from graph to graph, except parameters that stay gathered anyway."""

    def changed(read: PlannedRead) -> PlannedRead:
        return dataclasses.replace(read, keep=metadata[read.param].stays)

    graphs = {
        phase: dataclasses.replace(graph, reads=tuple(changed(read) for read in graph.reads))
        for phase, graph in plan.graphs.items()
    }
    return dataclasses.replace(plan, graphs=graphs, kept=frozenset())


Key = tuple[int, torch.dtype]
_StateMoves = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
ScheduledEvent = tuple[tuple[int, torch.dtype, str, bool], bool, list[list[Key]], _StateMoves]


def graph_schedule(graph_plan: GraphPlan, segments: Segments, phase: str) -> list[ScheduledEvent]:
    """What the runtime does at each event of a compiled graph. Its events are its beginning and its reads."""
    reads, slots = reads_of(segments), {param: slot for slot, param in enumerate(slots_of(segments))}
    small = small_params(segments.params.values())
    once = small | read_once(segments.segments)
    backward = phase == BACKWARD
    launches, all_moves = deque(graph_plan.launches), deque(graph_plan.moves)  # in the order of their segments

    def key(param: str) -> Key:
        return slots[param], segments.params[param].dtype

    def until(segment: int) -> tuple[list[list[Key]], _StateMoves]:
        """The gathers and moves planned up to ``segment`` that no earlier event has. (A segment without reads has no event,
        so the next event does what is planned there.)
        """
        gathers, moves = [], []
        while launches and launches[0].segment <= segment:
            gathers.append([key(param) for param in launches.popleft().params if param not in small])
        while all_moves and all_moves[0][0] <= segment:
            moves.append(all_moves.popleft()[1])
        offload, free, reload = (
            tuple(state for one in moves for state in getattr(one, name)) for name in ("offload", "free", "reload")
        )
        return [together for together in gathers if together], (offload, free, reload)

    gathers, moves = until(0)
    at_once = [key(read.param) for read in reads if read.param in small]
    events: list[ScheduledEvent] = [
        ((-1, torch.float32, "graph", backward), False, [at_once, *gathers] if at_once else gathers, moves)
    ]
    reads_of_param: dict[str, list[PlannedRead]] = {}
    for planned in graph_plan.reads:
        reads_of_param.setdefault(planned.param, []).append(planned)
    segments_of: dict[str, deque[int]] = {}  # parameter -> where its reads are that have no event yet
    for read in reads:
        segments_of.setdefault(read.param, deque()).append(read.segment)
    for read in reads:
        planned_reads, later = reads_of_param.get(read.param, []), segments_of[read.param]
        later.popleft()
        if read.param in once:  # the graph holds it to its last use
            keep = bool(planned_reads) and planned_reads[-1].keep
        else:
            current = next((one for one in planned_reads if one.segment <= read.segment <= one.last), None)
            keep = current is not None and (current.keep if not later or later[0] > current.last else True)
        events.append(((*key(read.param), "read", backward), keep, *until(read.segment)))
    return events
