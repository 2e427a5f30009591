"""Plans of whole steps: all micro-batches, reductions, new plans when times drift, and what happens when planning fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deepcompile
from deepcompile import plan as planner
from harness import only_on_cpu, run_ranks
from models import Run, assert_close, train_unsharded


def engine_of(run: Run) -> deepcompile.Engine:
    model = run.make()
    return deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)


def config(**more) -> dict:
    compiles = {"backend": "aot_eager"} | more.pop("compile", {})
    return {"zero_optimization": {"stage": 3}, "timeout": 60, "compile": compiles, **more}


STEPS = {"gradient_accumulation_steps": 4}


def accumulates(rank: int, world: int, run: Run) -> dict:
    engine = engine_of(run)
    losses, launched, live = [], [], []
    for step in range(run.steps):
        before = engine.stats()["gathers_launched"]
        for micro in range(run.accumulation):
            loss = engine(run.batch(rank, step, micro))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        launched.append(engine.stats()["gathers_launched"] - before)
        live.append(engine.stats()["gathered_bytes_live"])
    step = engine.sharding.planner.training_step()
    assert step is not None and step.plan is not None, step and step.why_not
    return {
        "losses": losses,
        "launched": launched[-1],
        "live": live[-1],
        "kept": sorted(step.plan.kept),
        "peak": max(step.plan.planned.peak_bytes, step.plan.micro.peak_bytes),
        "predicted": step.plan.planned.step_ns,
        "rows": dict(engine.explain().rows),
        "state": {name: value.clone() for name, value in deepcompile.full_state_dict(engine.module).items()},
    }


def test_parameters_are_gathered_once_for_all_micro_batches_where_memory_allows() -> None:
    estimated = {"profile_steps": 0}  # what is kept, and the peak that says what fits, would follow from measured times
    room = Run("llama", {"layers": 4, "size": 32}, config(compile=estimated, **STEPS), steps=3)
    losses, state = train_unsharded(room, 2)
    found = run_ranks(2, accumulates, room)
    count = len(list(room.make().parameters()))
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(losses[rank], rel=1e-5)
        for name, value in state.items():
            assert_close(one["state"][name], value, 1e-4, name)
        assert len(one["kept"]) == count and one["launched"] == count
        assert one["rows"]["kept for all micro-batches"] == f"{count} parameters"
        assert "for 4 micro-batches" in one["rows"]["predicted step"]

    least = run_ranks(
        2, accumulates, replace(room, config=config(compile={"strategy": "on_demand", **estimated}, **STEPS), steps=2)
    )[0]
    assert least["kept"] == [] and least["live"] == 0 and least["launched"] > 4 * count
    budget = least["peak"] + (found[0]["peak"] - least["peak"]) // 3
    bounded = replace(room, config=config(memory_budget=budget, compile=estimated, **STEPS))
    for rank, one in enumerate(run_ranks(2, accumulates, bounded)):
        assert one["losses"] == pytest.approx(losses[rank], rel=1e-5)
        assert len(one["kept"]) < count and count < one["launched"] < least["launched"]
        assert one["peak"] <= budget


def test_a_plan_lets_the_reductions_of_a_micro_batch_run_on_beside_the_next_forward() -> None:
    nodes = [
        f"node {name}{suffix} compute time=1ms phase={phase} block=0 micro={micro} uses=w"
        for micro, suffix in enumerate(("", "@1"))
        for name, phase in (("f0", "forward"), ("b0", "backward grads=w"))
    ]
    head = ["graph g", "world 2", "stage 3", "param w bytes=1000000B shard=500000B grad=1000000B state=1000000B"]
    graph = planner.StepGraph("\n".join([*head, *nodes, "node update optimizer time=1us updates=w"]) + "\n", "g")
    # A reduction takes as long as a forward, and does not slow it down.
    machine = planner.Machine("machine m like 2xcpu\nslowdown 0\ndevices 2\ngather 1000000B:1us\nreduce 1000000B:1ms\n")
    planned = planner.plan(graph, machine, budget=None, strategy="auto")
    names = [graph.nodes[node] if kind == "compute" else f"{kind} {op}" for kind, node, op, _ in planned.instructions]
    first = next(op for kind, _, op, _ in planned.instructions if kind == "reduce")
    assert names.index("b0") < names.index(f"reduce {first}") < names.index("f0@1") < names.index(f"wait {first}")
    assert planned.step_ns == pytest.approx(5e6, rel=0.02)  # four of compute and the last reduction


def reduces(rank: int, world: int, bucket: int | None) -> tuple[list[int], int, list[float], str]:
    zero = {"stage": 3} if bucket is None else {"stage": 3, "reduce_bucket_size": bucket}
    run = Run("llama", {"layers": 3, "size": 64}, config() | {"zero_optimization": zero}, steps=6)
    engine = engine_of(run)
    flushed, losses = [], []
    for step in range(run.steps):
        before = engine.stats()["buckets_flushed"]
        loss = engine(run.batch(rank, step, 0))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        flushed.append(engine.stats()["buckets_flushed"] - before)
    step = engine.sharding.planner.training_step()
    assert step is not None and step.plan is not None
    assert sorted(name for names in step.plan.reductions for name in names) == sorted(
        s.name for s in engine.sharding.params
    )
    return flushed, len(step.plan.reductions), losses, dict(engine.explain().rows)["reductions"]


def test_gradients_are_reduced_together_as_planned_unless_a_bucket_size_is_configured() -> None:
    worker = {"DEEPCOMPILE_CPU_STREAM": "worker"}  # reductions run beside the backward
    planned, sized = (run_ranks(2, reduces, bucket, environment=worker) for bucket in (None, 1))
    for (flushed, buckets, losses, said), by_size in zip(planned, sized, strict=True):
        assert flushed[-1] == buckets and said == f"{buckets} in a backward, as planned"
        assert by_size[0][-1] > 10 and by_size[3] == "by the size of the buckets"
        assert losses == pytest.approx(by_size[2], rel=1e-5)


def runs_out_of_memory(rank: int, world: int, replanning: bool) -> None:
    from deepcompile.planning import whole_step

    def fail(*args, **kwargs):
        raise MemoryError

    run = Run("llama", {}, config(), steps=6)
    engine = engine_of(run)
    if rank == 1 and not replanning:
        whole_step.planner.plan = fail  # what the planner's own allocation would do
    for step in range(run.steps):
        if rank == 1 and replanning and step == 1:
            whole_step.planner.plan = fail
        engine.backward(engine(run.batch(rank, step, 0)))
        engine.step()
    step = engine.sharding.planner.training_step()
    assert step is not None and "rank 1 ran out of memory while planning" in step.why_not
    if replanning:
        assert step.plan is not None and not step.measured  # the plan from estimates stays
    else:
        assert step.plan is None
        assert "ran out of memory" in dict(engine.explain().rows)["plan"]
    assert engine.steps == run.steps


@pytest.mark.parametrize("replanning", [False, True])
def test_a_rank_that_runs_out_of_memory_while_planning_leaves_all_with_the_safe_plan(replanning: bool) -> None:
    run_ranks(2, runs_out_of_memory, replanning)


def drifts(rank: int, world: int, factor: float, steps: int) -> tuple[list[tuple[float, float]], dict[str, str]]:
    settings = {"replan_factor": factor, "replan_steps": 3, "profile_steps": 2}
    run = Run("llama", {"layers": 2, "size": 32}, config(compile=settings))
    engine = engine_of(run)
    for step in range(steps):
        batch = run.batch(rank, step, 0)
        engine.backward(engine(torch.cat([batch] * (600 if step >= 7 else 1))))
        engine.step()
    return engine.drift.history, dict(engine.explain().rows)


@only_on_cpu("the same on a device: test_cuda.py")
def test_steps_that_take_much_longer_than_when_they_were_planned_are_measured_and_planned_again() -> None:
    first, second = run_ranks(2, drifts, 3.0, 16)
    assert first[0] == second[0] and first[0]
    expected, found = first[0][-1]
    assert found > 3 * expected or expected > 3 * found
    assert "when a step went from" in first[1]["planned again"] and "measured times" in first[1]["plan"]
    history, rows = run_ranks(2, drifts, 0.0, 9)[0]
    assert history == [] and "planned again" not in rows
