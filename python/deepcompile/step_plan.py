"""From cut graphs to the planner's step graph, and from its plan to what each graph gathers, keeps and launches when."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from deepcompile import plan as planner
from deepcompile.live_memory import storages, tensor_bytes
from deepcompile.segments import GATHER, MOVE_STATES, PREFETCH, REDUCE, Segments, cut, name_of
from deepcompile.state_moves import Moves, Schedule, placed_moves, state_schedule

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class ParamFacts:
    """What the planner has to know of a parameter besides what the graph shows."""

    shard_bytes: int
    grad_bytes: int  # of the gradient as a whole, in the dtype in which it is reduced; 0: frozen
    state_bytes: int  # of the optimizer's state on this rank
    stays: bool  # gathered from update to update, whatever the plan
    sum_bytes: int = 0  # of this rank's part of the gradient, where reductions add up
    cast_bytes: int = 0  # of the gradient as it is made, where it must be copied to be reduced
    id: int = -1  # by which the runtime knows it


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
    text: str  # of the step graph
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

    @property
    def hash(self) -> str:
        return self.planned.hash if self.micro is self.planned else f"{self.planned.hash}+{self.micro.hash}"


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def step_graph_text(
    name: str,
    graphs: Mapping[str, Segments],
    facts: Mapping[str, ParamFacts],
    world: int,
    seconds: Mapping[str, list[float]],
    saved: list[tuple[str, int, int, int]],
    update_seconds: float = 1e-6,
    *,
    micro_batches: int = 1,
    kept: Iterable[str] = (),
    late_gradients: bool = False,
    pieces: Sequence[Sequence[str]] = (),
    piece_workspace: Sequence[int] = (),
) -> str:
    """The planner's text form. ``seconds``: of each segment, by phase; ``saved``: (buffer, bytes, forward segment that makes
    it, backward segment that reads it last); ``update_seconds``: of the optimizer; ``kept``: parameters that stay gathered
    all the time; ``late_gradients``: memory for gradients is taken when the first backward has them, and goes with the
    update; ``pieces``: parameters that are updated together, where they are not all, with the bytes that each needs beside.
    """
    lines = [f"graph {name}", f"world {world}", "stage 3"]
    params = {param.name: param for segments in graphs.values() for param in segments.params.values()}
    stays = {param for param in params if facts[param].stays} | set(kept)
    updated = [p for p in params if BACKWARD in graphs and facts[p].grad_bytes and _has_gradient(graphs[BACKWARD], p)]
    for param in params.values():
        fact = facts[param.name]
        options = f"bytes={param.bytes}B shard={fact.shard_bytes}B"
        if fact.grad_bytes:
            late = late_gradients and param.name in updated
            options += f" grad={fact.grad_bytes}B accum={0 if late else fact.sum_bytes}B state={fact.state_bytes}B"
        options += " persistent" if param.name in stays else ""
        lines.append(f"param {param.name} {options}{'' if fact.grad_bytes else ' frozen'}")
    lines += [f"buffer gradient:{p} bytes={facts[p].sum_bytes}B gradient" for p in updated if late_gradients]
    for micro in range(micro_batches):
        lines += [f"buffer {buffer}{_suffix(micro)} bytes={size}B" for buffer, size, _, _ in saved]
    # A gradient is reduced when its node has run: memory for the sum is there from the next node on.
    to_come = set(updated) if late_gradients else set()
    reduced: list[str] = []
    for micro in range(micro_batches):
        for phase, segments in graphs.items():
            for index, segment in enumerate(segments.segments):
                line = f"node {node_name(phase, index, micro)} compute time={_nanoseconds(seconds[phase][index])}ns"
                line += f" phase={phase} block={index}" + (f" micro={micro}" if micro_batches > 1 else "")
                grads = [grad for grad in segment.grads if grad in facts and facts[grad].grad_bytes]
                line += f" uses={','.join(segment.uses)}" if segment.uses else ""
                line += f" grads={','.join(grads)}" if grads else ""
                place = 2 if phase == FORWARD else 3
                buffers = [f"{entry[0]}{_suffix(micro)}" for entry in saved if entry[place] == index]
                made, read = (buffers + reduced, []) if phase == FORWARD else (reduced, buffers)
                line += f" reads={','.join(read)}" if read else ""
                line += f" makes={','.join(made)}" if made else ""
                reduced = [f"gradient:{grad}" for grad in grads if grad in to_come]
                to_come -= set(grads)
                workspace = segment.workspace + max((facts[grad].cast_bytes for grad in grads), default=0)
                line += f" workspace={workspace}B" if workspace else ""
                lines.append(line)
    cut_up = [[param for param in piece if param in updated] for piece in pieces] or [updated]
    everything = sum(facts[param].shard_bytes for param in updated) or 1
    for index, piece in enumerate(cut_up if updated else ()):
        share = sum(facts[param].shard_bytes for param in piece) / everything
        line = f"node {update_name(index, len(cut_up))} optimizer time={_nanoseconds(update_seconds * share)}ns"
        line += f" updates={','.join(piece)}" if piece else ""
        line += f" makes={','.join(reduced)}" if reduced and index == 0 else ""
        if late_gradients and index == len(cut_up) - 1:  # all go when all are updated
            there = [f"gradient:{p}" for p in updated if index > 0 or f"gradient:{p}" not in reduced]
            line += f" reads={','.join(there)}" if there else ""
        line += f" workspace={piece_workspace[index]}B" if piece_workspace else ""
        lines.append(line)
    return "\n".join(lines) + "\n"


def _suffix(micro: int) -> str:
    return f"@{micro}" if micro else ""


def node_name(phase: str, index: int, micro: int = 0) -> str:
    return f"{phase[0]}{index}{_suffix(micro)}"


def update_name(piece: int, pieces: int) -> str:
    return f"update{piece}" if pieces > 1 else "update"


def _has_gradient(segments: Segments, param: str) -> bool:
    return any(param in segment.grads for segment in segments.segments)


def saved_buffers(
    forward: Segments, backward: Segments, backward_module: fx.GraphModule
) -> list[tuple[str, int, int, int]]:
    """What the forward saves for the backward: placeholders of the backward that a node of the forward has the name of.
    Views of the same memory are one buffer.
    """
    made = {node.name: node for segment in forward.segments for node in segment.nodes}
    made_in = {node: index for index, segment in enumerate(forward.segments) for node in segment.nodes}
    storage = storages(next(iter(made_in)).graph) if made_in else {}
    read_in: dict[fx.Node, int] = {}
    for index, segment in enumerate(backward.segments):
        read_in |= {source: index for node in segment.nodes for source in node.all_input_nodes}
    found: dict[fx.Node, tuple[str, int, int, int]] = {}
    for node in backward_module.graph.nodes:
        if node.op != "placeholder" or node.name not in made or node not in read_in:
            continue
        base = storage[made[node.name]]
        size = tensor_bytes(base.meta.get("val"))
        if size and base in made_in:
            before = found.get(base)
            last = max(read_in[node], before[3] if before else 0)
            found[base] = (before[0] if before else f"saved:{node.name}", size, made_in[base], last)
    return list(found.values())


def placed_gathers(
    planned: planner.Plan, graphs: Mapping[str, Segments]
) -> tuple[dict[str, int], list[tuple[int, tuple[str, ...]]], dict[str, list[list[int]]]]:
    """The position of each segment's node in the step; the gathers of the plan, each with the position before which it is
    started; and for each parameter the stretches [from, to) of positions in which it is gathered.
    """
    nodes = [node_name(phase, index) for phase, cut_ in graphs.items() for index in range(len(cut_.segments))]
    position = {node: number for number, node in enumerate(nodes)}
    launches: list[tuple[int, tuple[str, ...]]] = []
    intervals: dict[str, list[list[int]]] = {}
    following = 0  # the position of the next segment
    for kind, node, _, items in planned.instructions:
        if kind in ("compute", "optimizer"):
            following = position[node] + 1 if node in position else len(nodes)
        elif kind == "gather":
            launches.append((following, tuple(items)))
            for param in items:
                intervals.setdefault(param, []).append([following, len(nodes)])
        elif kind == "release":
            for param in items:
                intervals[param][-1][1] = following
    return position, launches, intervals


def step_plan(
    text: str,
    planned: planner.Plan,
    graphs: Mapping[str, Segments],
    facts: Mapping[str, ParamFacts],
    kept: frozenset[str] = frozenset(),
    pieces: int = 0,
) -> StepPlan:
    """Reads the plan of one micro-batch as what each graph does. ``pieces`` of an update around which the optimizer's states
    move; 0 where they do not.
    """
    position, launches, intervals = placed_gathers(planned, graphs)
    order = range(len(position))
    takes: dict[str, list[Take]] = {phase: [] for phase in graphs}
    for phase, segments in graphs.items():
        for param in segments.params:
            used = [index for index, segment in enumerate(segments.segments) if param in segment.uses]
            if not used:
                continue
            if facts[param].stays or param in kept:
                takes[phase].append(Take(used[0], param, True, used[-1]))
                continue
            base = position[f"{phase[0]}0"]
            for begin, end in intervals.get(param, [[0, len(order)]]):
                inside = [index for index in used if begin <= base + index < end]
                if inside:
                    later = phase == FORWARD and BACKWARD in graphs and end > base + len(segments.segments)
                    keep = later and any(param in s.uses for s in graphs[BACKWARD].segments)
                    # One that came from the forward is there already; nothing is waited for.
                    takes[phase].append(Take(0 if begin < base else inside[0], param, keep, inside[-1]))
    moves: list[Moves] = []
    if pieces:
        updates = [update_name(index, pieces) for index in range(pieces)]
        ids = {param: fact.id for param, fact in facts.items()}
        moves = placed_moves(planned, [*position, *updates], ids)
    result = {}
    for phase, segments in graphs.items():
        base = position[f"{phase[0]}0"]
        states = enumerate(moves[base : base + len(segments.segments)])
        own = [
            Launch(where - base, params)
            for where, params in launches
            if base <= where < base + len(segments.segments) and params
        ]
        together = _taken_together(takes[phase], own)
        result[phase] = GraphPlan(
            tuple(together), tuple(_worthwhile(own, together)), tuple((index, one) for index, one in states if one)
        )
    reductions = tuple(tuple(items) for kind, _, _, items in planned.instructions if kind == "reduce")
    found = StepPlan(result, planned, text, planned, kept=kept, reductions=reductions)
    found.reductions_in_flight = _most_in_flight(planned)
    if pieces:
        found.states = state_schedule(moves, moves[len(position) :])
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


def planned_graph(old: fx.Graph, graph_plan: GraphPlan) -> fx.Graph | None:
    """Another graph, as planned: launches and takes at the segments' beginnings, what is computed from gathers where it is
    used. None when the graph is not of the planned structure.
    """
    segments = cut(old)
    starts = {segment.first: index for index, segment in enumerate(segments.segments) if segment.first is not None}
    shards = {name_of(node): node for node in old.nodes if node.target is GATHER}
    wanted = {(index, use) for index, segment in enumerate(segments.segments) for use in segment.uses}
    covered = {(i, take.param) for take in graph_plan.takes for i in range(take.segment, take.last + 1)}
    if not wanted <= covered or any(take.param not in shards for take in graph_plan.takes):
        return None

    new = fx.Graph()
    new._codegen = copy.deepcopy(old._codegen)
    environment: dict[fx.Node, fx.Node] = {}
    current: dict[str, fx.Node] = {}  # parameter -> what its last take returned
    # A backward may gather nothing; then it reduces.
    own_id = next(
        node.args[1] if node.target is GATHER else node.args[2] for node in old.nodes if node.target in (GATHER, REDUCE)
    )
    pinned = {"val": None, "deepcompile_pinned": True, "partitioner_tag": "is_forward"}

    def value(node: fx.Node) -> fx.Node:
        if node not in environment:  # computed only from gathers: where it is used first, from the current take
            assert node in segments.roots, node
            if node.target is GATHER:
                return current[name_of(node)]
            environment[node] = new.node_copy(node, value)
        return environment[node]

    def begin(index: int) -> None:
        for segment, moves in graph_plan.moves:
            if segment == index:
                node = new.call_function(MOVE_STATES, (own_id, *map(list, (moves.leave, moves.let_go, moves.fetch))))
                node.meta = dict(pinned)
        for launch in graph_plan.launches:
            if launch.segment == index:
                gathers = [shards[param] for param in launch.params if param in shards]
                arguments = [environment[g.args[0]] for g in gathers]
                dtypes = [segments.params[name_of(g)].dtype for g in gathers]
                node = new.call_function(PREFETCH, (arguments, gathers[0].args[1], dtypes))
                node.meta = dict(pinned)
        for take in graph_plan.takes:
            if take.segment == index:
                gather = shards[take.param]
                shard, graph_id, shape = gather.args[:3]
                dtype = segments.params[take.param].dtype
                node = new.call_function(GATHER, (environment[shard], graph_id, shape, dtype, take.keep, 0))
                node.meta = {**gather.meta, "deepcompile_pinned": True}
                current[take.param] = node
                for derived, params in segments.roots.items():
                    if take.param in params:
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


__all__ = [
    "BACKWARD",
    "FORWARD",
    "GraphPlan",
    "Launch",
    "ParamFacts",
    "StepPlan",
    "Take",
    "node_name",
    "placed_gathers",
    "planned_graph",
    "saved_buffers",
    "step_graph_text",
    "step_plan",
    "update_name",
    "without_keeping",
]
