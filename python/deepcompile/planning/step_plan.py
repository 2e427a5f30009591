"""From the planner's plan of a step to what each compiled graph gathers, keeps and starts when, and to the schedule by which
it runs. The graphs themselves know no plan: they are compiled once, with their reads in a fixed order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from deepcompile import plan as planner
from deepcompile.compiler.reads import reads_of, slots_of
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segments, read_once, small_params
from deepcompile.planning.step_graph import ParamFacts, first_nodes
from deepcompile.runtime.load import _C
from deepcompile.sharding.state_moves import Moves, Schedule, placed_moves, state_schedule


@dataclasses.dataclass(frozen=True)
class Take:
    """One gather in a graph: before which segment, and whether a copy is kept for a later graph."""

    segment: int
    param: str
    keep: bool
    last: int  # the last segment that reads what it returns


@dataclasses.dataclass(frozen=True)
class Launch:
    """A fused gather that is started before a segment."""

    segment: int
    params: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    takes: tuple[Take, ...]
    launches: tuple[Launch, ...]
    #: Of the optimizer's states, each before a segment.
    moves: tuple[tuple[int, Moves], ...] = ()


@dataclasses.dataclass
class StepPlan:
    """What all graphs of one step do, with the plan it came from."""

    graphs: dict[str, GraphPlan]  # by phase
    planned: planner.Plan  # of the whole step, all micro-batches
    #: Of one micro-batch, beside which what is kept from one to the next stays: what the graphs do. The same as
    #: ``planned`` where there is no accumulation.
    micro: planner.Plan
    micro_batches: int = 1  # of ``planned``
    #: Gathered once in a step and kept for all its micro-batches.
    kept: frozenset[str] = frozenset()
    #: Gradients that are reduced together, in the order of the reductions.
    reductions: tuple[tuple[str, ...], ...] = ()
    reductions_in_flight: int = 2  # at most, at any time
    #: Of the optimizer's states; None where the plan does not know where they are.
    states: Schedule | None = None
    #: By which the compiled graphs run, by phase.
    schedules: dict[str, _C.StepSchedule] = dataclasses.field(default_factory=dict)

    @property
    def hash(self) -> str:
        return self.planned.hash if self.micro is self.planned else f"{self.planned.hash}+{self.micro.hash}"


@dataclasses.dataclass
class Gathers:
    """A plan's gathers of one micro-batch, by the numbers of the segments' nodes."""

    #: The node before which each is started, with its parameters.
    launches: list[tuple[int, tuple[str, ...]]]
    #: For each parameter the stretches [from, to) of nodes in which it is gathered.
    intervals: dict[str, list[list[int]]]
    #: Nodes of segments: all but those of the update.
    nodes: int


def placed_gathers(planned: planner.Plan, graphs: Mapping[str, Segments]) -> Gathers:
    names = planned.graph.params
    found = Gathers([], {}, sum(len(segments.segments) for segments in graphs.values()))
    following = 0
    for kind, node, _, items in planned.instructions:
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
    return found


def reductions_of(planned: planner.Plan) -> list[tuple[str, ...]]:
    """The parameters whose gradients each reduction of the plan takes, in its order."""
    names = planned.graph.params
    return [tuple(names[index] for _, index in items) for kind, _, _, items in planned.instructions if kind == "reduce"]


def step_plan(
    planned: planner.Plan,
    graphs: Mapping[str, Segments],
    facts: Mapping[str, ParamFacts],
    kept: frozenset[str] = frozenset(),
    pieces: int = 0,
) -> StepPlan:
    """Reads the plan of one micro-batch as what each graph does. ``pieces`` of an update around which the optimizer's states
    move; 0 where they do not.
    """
    gathers, first = placed_gathers(planned, graphs), first_nodes(graphs)
    takes: dict[str, list[Take]] = {phase: [] for phase in graphs}
    for phase, segments in graphs.items():
        for param in segments.params:
            used = [index for index, segment in enumerate(segments.segments) if param in segment.uses]
            if not used:
                continue
            if facts[param].stays or param in kept:
                takes[phase].append(Take(used[0], param, True, used[-1]))
                continue
            base = first[phase]
            for begin, end in gathers.intervals.get(param, [[0, gathers.nodes]]):
                inside = [index for index in used if begin <= base + index < end]
                if inside:
                    later = phase == FORWARD and BACKWARD in graphs and end > base + len(segments.segments)
                    keep = later and any(param in s.uses for s in graphs[BACKWARD].segments)
                    # One that came from the forward is there already; nothing is waited for.
                    takes[phase].append(Take(0 if begin < base else inside[0], param, keep, inside[-1]))
    moves: list[Moves] = []
    if pieces:
        moves = placed_moves(planned, [facts[param].id for param in planned.graph.params])
    result = {}
    for phase, segments in graphs.items():
        base = first[phase]
        states = enumerate(moves[base : base + len(segments.segments)])
        own = [
            Launch(where - base, params)
            for where, params in gathers.launches
            if base <= where < base + len(segments.segments) and params
        ]
        together = _taken_together(takes[phase], own)
        result[phase] = GraphPlan(
            tuple(together), tuple(_worthwhile(own, together)), tuple((index, one) for index, one in states if one)
        )
    found = StepPlan(result, planned, planned, kept=kept, reductions=tuple(reductions_of(planned)))
    found.reductions_in_flight = _most_in_flight(planned)
    if pieces:
        found.states = state_schedule(moves, moves[gathers.nodes :])
    return found


def _most_in_flight(planned: planner.Plan) -> int:
    """How many reductions the plan has under way at once, at most."""
    under_way: set[int | None] = set()
    most = 1
    for kind, _, operation, _ in planned.instructions:
        if kind == "reduce":
            most = max(most, len(under_way))  # the caller waits, if it must, when it has started the next
            under_way.add(operation)
        elif kind == "wait":
            under_way.discard(operation)
    return most


def _taken_together(takes: list[Take], launches: list[Launch]) -> list[Take]:
    """Parameters of one collective arrive together: waiting for the first is waiting for all, and each place at which a
    graph waits keeps Inductor from fusing across it.
    """
    moved = {id(take): take for take in takes}
    for number, launch in enumerate(launches):
        members = []
        for param in launch.params:
            again = [later.segment for later in launches[number + 1 :] if param in later.params]
            limit = min(again, default=None)
            mine = [
                t
                for t in takes
                if t.param == param and launch.segment <= t.segment and (limit is None or t.segment < limit)
            ]
            members += mine[:1]
        if members:
            first = min(take.segment for take in members)
            for take in members:
                moved[id(take)] = dataclasses.replace(take, segment=first)
    return sorted(moved.values(), key=lambda take: take.segment)


def _worthwhile(launches: list[Launch], takes: list[Take]) -> list[Launch]:
    """Without those whose one parameter is taken right there: the take starts it itself."""
    at = {(take.segment, take.param) for take in takes}
    return [one for one in launches if len(one.params) > 1 or (one.segment, one.params[0]) not in at]


def without_keeping(plan: StepPlan, facts: Mapping[str, ParamFacts]) -> StepPlan:
    """The same, but each graph gathers for itself, except what stays whatever the plan."""

    def changed(take: Take) -> Take:
        return dataclasses.replace(take, keep=facts[take.param].stays)

    graphs = {
        phase: dataclasses.replace(graph, takes=tuple(changed(take) for take in graph.takes))
        for phase, graph in plan.graphs.items()
    }
    return dataclasses.replace(plan, graphs=graphs, kept=frozenset())


Key = tuple[int, torch.dtype]
_StateMoves = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
ScheduledEvent = tuple[tuple[int, torch.dtype, str, bool], bool, list[list[Key]], _StateMoves]


def graph_schedule(graph_plan: GraphPlan, segments: Segments, phase: str) -> list[ScheduledEvent]:
    """What the runtime does at each event of a compiled graph: at its beginning, and at each of its reads."""
    reads, slots = reads_of(segments), slots_of(segments)
    small = small_params(segments.params.values())
    once = small | read_once(segments.segments)
    backward = phase == BACKWARD

    def key(param: str) -> Key:
        return slots.index(param), segments.params[param].dtype

    def until(segment: int, since: int) -> tuple[list[list[Key]], _StateMoves]:
        """What the plan has behind the beginning of segment ``since``: a segment that reads nothing has no event."""
        planned = [one.params for one in graph_plan.launches if since < one.segment <= segment]
        gathers = [[key(param) for param in params if param not in small] for params in planned]
        moves = [one for index, one in graph_plan.moves if since < index <= segment]
        leave, free, fetch = (
            tuple(state for one in moves for state in getattr(one, name)) for name in ("leave", "free", "fetch")
        )
        return [together for together in gathers if together], (leave, free, fetch)

    gathers, moves = until(0, since=-1)
    at_once = [key(read.param) for read in reads if read.param in small]
    events: list[ScheduledEvent] = [
        ((-1, torch.float32, "graph", backward), False, [at_once, *gathers] if at_once else gathers, moves)
    ]
    begun = 0
    for place, read in enumerate(reads):
        takes = [take for take in graph_plan.takes if take.param == read.param]
        if read.param in once:  # the graph holds it to its last use
            keep = bool(takes) and takes[-1].keep
        else:
            take = next((one for one in takes if one.segment <= read.segment <= one.last), None)
            again = next((later.segment for later in reads[place + 1 :] if later.param == read.param), None)
            keep = take is not None and (take.keep if again is None or again > take.last else True)
        events.append(((*key(read.param), "read", backward), keep, *until(read.segment, since=begun)))
        begun = read.segment
    return events
