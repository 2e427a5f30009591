"""From traced graphs to segments, plans and schedules, without other ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import deepcompile
from deepcompile import plan as planner
from deepcompile.compiler.reads import GraphRead, reads_of, slots_of, with_reads
from deepcompile.compiler.segments import (
    BACKWARD,
    FORWARD,
    GATHER,
    GatheredParam,
    Segment,
    Segments,
    cut,
    mark_params,
    name_of,
)
from deepcompile.compiler.step_outline import Saved
from deepcompile.planning.profile import measured_machine, segment_seconds
from deepcompile.planning.step_graph import ParamMetadata, step_graph
from deepcompile.planning.step_plan import GraphPlan, Launch, PlannedRead, graph_schedule, step_plan
from deepcompile.planning.whole_step import Inputs, plan_whole_step
from deepcompile.runtime.load import _C
from deepcompile.sharding.sharding import sharding_of
from deepcompile.sharding.state_moves import Moves
from harness import run_ranks


def traced(names: dict[str, str] | None = None) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Two large weights, a small one, and the first again: wa, norm, wb, wa. Placeholders: x, wa, wb, norm."""
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "wa": nn.Parameter(torch.randn(64, 64)),
            "wb": nn.Parameter(torch.randn(64, 64)),
            "norm": nn.Parameter(torch.randn(64)),
        }
    )
    deepcompile.shard(model, {"timeout": 20})
    graph_id = sharding_of(model).graph_id
    shards = [model._parameters[name].detach() for name in ("wa", "wb", "norm")]

    def forward(x: torch.Tensor, wa: torch.Tensor, wb: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        def read(shard: torch.Tensor, shape: list[int]) -> torch.Tensor:
            return torch.ops.dc.gather_shard(shard, graph_id, shape, torch.float32)

        first = read(wa, [64, 64])
        y = torch.relu(x @ first.t()) * read(norm, [64])
        y = torch.tanh(y @ read(wb, [64, 64]).t())
        return y @ first

    inputs = [torch.randn(3, 64), *shards]
    module = make_fx(forward, tracing_mode="fake")(*inputs)
    mark_params([module], {f"{name}_1": name for name in ("wa", "wb", "norm")})
    traced.model = model  # keeps the sharding alive
    return module, inputs


def cuts(rank: int, world: int) -> None:
    module, _ = traced()
    segments = cut(module.graph)
    assert [segment.uses for segment in segments.segments] == [[], ["wa", "norm"], ["wb"], ["wa"]]
    assert all(segment.seconds > 0 for segment in segments.segments[1:])
    assert segments.params["wa"].bytes == 64 * 64 * 4


def test_a_segment_begins_where_a_large_parameter_is_used_and_small_ones_join_it() -> None:
    run_ranks(1, cuts)


def reads(rank: int, world: int) -> None:
    module, inputs = traced()
    expected = module(*inputs)
    before = str(module.graph)
    graph = with_reads(module.graph)
    assert str(module.graph) == before
    order = [
        name_of(node) if node.target is GATHER else "product"
        for node in graph.nodes
        if node.target in (GATHER, torch.ops.aten.mm.default)
    ]
    assert order == ["norm", "wa", "product", "wb", "product", "wa", "product"]
    assert [(read.segment, read.param) for read in reads_of(cut(module.graph))] == [
        (0, "norm"), (1, "wa"), (2, "wb"), (3, "wa")
    ]  # fmt: skip
    assert torch.equal(fx.GraphModule(module, graph)(*inputs), expected)
    assert sharding_of(traced.model).runtime.stats()["gathered_bytes_live"] == 0


def test_a_graph_reads_a_large_parameter_in_each_segment_and_a_small_one_once_whatever_the_plan() -> None:
    run_ranks(1, reads)


def schedules(rank: int, world: int) -> None:
    module, _ = traced()
    segments = cut(module.graph)
    slots = slots_of(segments)
    fp32 = torch.float32

    def event(name: str, keep: bool, *launches: str, moves: tuple = ((), (), ())) -> tuple:
        gathers = [[(slots.index(param), fp32) for param in launch.split()] for launch in launches]
        key = (-1, fp32, "graph") if name == "begin" else (slots.index(name), fp32, "read")
        return ((*key, False), keep, gathers, moves)

    moves = Moves(offload=(1,), free=(2,))
    again = GraphPlan(
        reads=(
            PlannedRead(1, "wa", False, 1),
            PlannedRead(1, "norm", True, 1),
            PlannedRead(2, "wb", False, 2),
            PlannedRead(3, "wa", False, 3),
        ),
        launches=(Launch(0, ("wa", "norm")), Launch(1, ("wb",)), Launch(2, ("wa",))),
        moves=((0, moves), (2, moves)),
    )
    assert graph_schedule(again, segments, FORWARD) == [
        event("begin", False, "norm", "wa", moves=((1,), (2,), ())),
        event("norm", True),
        event("wa", False, "wb"),
        event("wb", False, "wa", moves=((1,), (2,), ())),
        event("wa", False),
    ]
    # A segment that reads nothing, here the second, has no event: the next read does what the plan has there.
    silent = dataclasses.replace(segments, segments=[dataclasses.replace(one) for one in segments.segments])
    silent.segments[2].uses = []
    assert graph_schedule(again, silent, FORWARD)[-1] == event("wa", False, "wa", moves=((1,), (2,), ()))
    # What is taken once stays from its first read to its last.
    stays = GraphPlan(
        reads=(PlannedRead(1, "wa", False, 3), PlannedRead(1, "norm", False, 1), PlannedRead(2, "wb", True, 2)),
        launches=(),
    )
    assert graph_schedule(stays, segments, FORWARD) == [
        event("begin", False, "norm"), event("norm", False), event("wa", True), event("wb", True), event("wa", False)
    ]  # fmt: skip


def test_a_schedule_says_what_is_done_at_each_event_of_a_graph() -> None:
    run_ranks(1, schedules)


def from_planner(rank: int, world: int, strategy: str) -> None:
    module, inputs = traced()
    expected = module(*inputs)
    segments = cut(module.graph)
    facts = {name: ParamMetadata(p.bytes, 0, 0, False) for name, p in segments.params.items()}
    seconds = {FORWARD: [segment.seconds for segment in segments.segments]}
    graph = step_graph("test", {FORWARD: segments}, facts, 2, seconds, [])
    planned = planner.plan(graph, planner.preset("2xcpu"), budget=1 << 20, strategy=strategy)
    result = step_plan(planned, {FORWARD: segments}, facts)
    sharding = sharding_of(traced.model)
    events = graph_schedule(result.graphs[FORWARD], segments, FORWARD)
    shards = {s.name: s.flat for s in sharding.params}
    runs = fx.GraphModule(module, with_reads(module.graph))
    for _ in range(2):
        _C.begin_graph(sharding.graph_id, _C.StepSchedule(events), [shards[name] for name in slots_of(segments)])
        assert torch.equal(runs(*inputs), expected)
    assert sharding.runtime.stats()["gathered_bytes_live"] == 0


def says_when_gradients_come(rank: int, world: int) -> None:
    module, _ = traced()
    segments = cut(module.graph)
    names = list(segments.params)
    backward = dataclasses.replace(
        segments, segments=[dataclasses.replace(s, grads=list(s.uses), uses=[]) for s in segments.segments]
    )
    facts = {name: ParamMetadata(64, 128, 64, False, sum_bytes=1 << 20) for name in names}
    graphs = {FORWARD: segments, BACKWARD: backward}
    seconds = {phase: [1e-3] * len(graph.segments) for phase, graph in graphs.items()}

    def peak(micro_batches: int = 1, **how: bool) -> tuple[int, str]:
        graph = step_graph("test", graphs, facts, 2, seconds, [], micro_batches=micro_batches, **how)
        planned = planner.plan(graph, planner.preset("2xcpu"), strategy="on_demand")
        held = dict(json.loads(planned.json())["held_at_peak"])
        assert held["gradient shards"] == len(names) << 20, "at the end of the backward all are there"
        return planned.peak_bytes, graph.text

    (resident, _), (late, text) = peak(), peak(late_gradients=True)
    assert late <= resident
    for name in names:
        (declared,) = [line for line in text.splitlines() if line.startswith(f"buffer gradient:{name} ")]
        assert declared.endswith(" gradient")
        assert len([line for line in text.splitlines() if " makes=" in line and f"gradient:{name}" in line]) == 1
    # A forward with much in it does not meet the gradients.
    busy = [Saved(0, 0, 8 << 20)]
    both = [step_graph("t", graphs, facts, 2, seconds, busy, late_gradients=late) for late in (False, True)]
    least = [planner.least_budget(graph, planner.preset("2xcpu")) for graph in both]
    assert least[0] - least[1] >= (len(names) - 1) << 20
    # In every micro-batch but the first they are there from the start, and what its graphs do holds for all.
    inputs = Inputs("t", graphs, facts, 2, seconds, busy, 1e-3, planner.preset("2xcpu"), 1 << 30, "on_demand", True)

    def sums_at_peak(micro_batches: int) -> int:
        return dict(json.loads(plan_whole_step(inputs, micro_batches).micro.json())["held_at_peak"]).get(
            "gradient shards", 0
        )

    assert sums_at_peak(1) < sums_at_peak(2) == len(names) << 20
    # Over several micro-batches they come with the first.
    _, text = peak(micro_batches=2, late_gradients=True)
    makers = [line.split()[1] for line in text.splitlines() if " makes=" in line and "gradient:" in line]
    assert makers
    assert set(makers) <= {f"b{index}" for index in range(len(backward.segments))} | {"f0@1"}


def test_a_step_graph_says_when_memory_for_gradients_is_taken() -> None:
    run_ranks(1, says_when_gradients_come)


@pytest.mark.parametrize("strategy", ["on_demand", "per_block", "published", "planned"])
def test_a_plan_of_every_strategy_computes_the_same(strategy: str) -> None:
    run_ranks(1, from_planner, strategy)


def test_segments_are_measured_between_the_waits_and_share_where_they_wait_for_nothing() -> None:
    plan = [GraphRead(0, "a"), GraphRead(0, "b"), GraphRead(3, "c")]
    takes = [("a", 100, 200), ("b", 210, 300), ("c", 900, 1000)]
    found = segment_seconds(plan, takes, 0, 1500, [1.0, 3.0, 2.0, 5.0])
    assert found == pytest.approx([710e-9 / 6, 710e-9 / 2, 710e-9 / 3, 500e-9])
    assert segment_seconds(plan, takes[:2], 0, 1500, [1.0, 3.0, 2.0, 5.0]) is None
    collectives = [(120, 190), (400, 500), (850, 1100)]  # in a wait, in a segment, and in one, a wait and the next
    found = segment_seconds(plan, takes, 0, 1500, [1.0, 3.0, 2.0, 5.0], collectives)
    assert found == pytest.approx([560e-9 / 6, 560e-9 / 2, 560e-9 / 3, 400e-9])
    sunk = [("a", 100, 200), ("b", 600, 690), ("c", 900, 1000)]  # to where it is used first
    assert segment_seconds(plan, sunk, 0, 1500, [1.0, 3.0, 2.0, 5.0]) == pytest.approx(
        [710e-9 / 6, 710e-9 / 2, 710e-9 / 3, 500e-9]
    )


def test_a_measured_curve_never_falls_and_replaces_the_one_before() -> None:
    machine = planner.preset("2xcpu")
    for _ in range(2):
        machine = measured_machine(machine, {1000: 2e-5, 2000: 1e-5, 4000: 3e-5}, {})
    assert machine.gather == [(1000, 20_000), (2000, 20_000), (4000, 30_000)]


@pytest.mark.parametrize("sizes", [9, 10, 17, 100])
def test_a_measured_curve_keeps_its_ends_when_it_is_thinned_out(sizes: int) -> None:
    curve = {1000 * (index + 1): 1e-5 * (index + 1) for index in range(sizes)}
    machine = measured_machine(planner.preset("2xcpu"), {}, curve)
    assert machine.reduce[0] == (1000, 10_000) and machine.reduce[-1] == (1000 * sizes, 10_000 * sizes)
    assert len(machine.reduce) == 9


def lines_to_plan_again(reads: int) -> int:
    """Lines of Python that run from two cut graphs to their schedules."""
    params = {f"w{index}": GatheredParam(f"w{index}", (256, 256), torch.bfloat16) for index in range(reads // 2)}
    graphs = {
        FORWARD: Segments(params, [Segment(None, [param]) for param in params], {}),
        BACKWARD: Segments(params, [Segment(None, [param], [param]) for param in reversed(params)], {}),
    }
    facts = {
        p: ParamMetadata(param.bytes // 2, param.bytes, param.bytes, False, param.bytes) for p, param in params.items()
    }
    seconds = {phase: [1e-4] * len(params) for phase in graphs}
    saved = [Saved(index, len(params) - 1 - index, 1 << 20) for index in range(len(params))]
    machine = planner.preset("8xh100").replace(offload="no")
    inputs = Inputs("test", graphs, facts, 2, seconds, saved, 1e-3, machine, 1 << 30, "per_block", late_gradients=True)
    lines = 0

    def count(frame: types.FrameType, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        found = plan_whole_step(inputs, micro_batches=1)
        events = {phase: graph_schedule(found.graphs[phase], segments, phase) for phase, segments in graphs.items()}
    finally:
        sys.settrace(None)
    assert sum(map(len, events.values())) == reads + 2  # one at the beginning of each graph
    return lines


def test_planning_again_takes_lines_in_proportion_to_the_reads() -> None:
    """Counted, not timed: a search through a list for each read would take sixteen times as many for four times as many."""
    assert lines_to_plan_again(1600) < 4.5 * lines_to_plan_again(400)
