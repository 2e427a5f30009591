"""The engine's mode "replay": it records, compiles and replays by itself."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import deepcompile
from dynamic_models import DynamicRun
from harness import run_ranks
from models import Run, train_with_engine
from test_replay_divergence import messages


def config(mode: str, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "compile": {"enabled": True, "mode": mode, "profile_steps": 2},
        "timeout": 20,
        **more,
    }


def both_modes(rank: int, world: int, stage: int) -> tuple:
    more = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    return tuple(
        train_with_engine(rank, world, Run("llama", {}, config(mode, stage, **more), steps=6))
        for mode in ("off", "replay")
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_replays_gives_the_bits_of_one_that_gathers_on_demand(stage: int) -> None:
    for on_demand, replayed in run_ranks(2, both_modes, stage):
        assert replayed[0] == on_demand[0]
        assert all(torch.equal(value, on_demand[1][name]) for name, value in replayed[1].items())
        gathers = [stats["collectives"]["all_gather"] for _, _, stats in (replayed, on_demand)]
        assert gathers[0] < gathers[1]


def speaks(rank: int, world: int, folder: str) -> None:
    said = messages()
    run = Run("llama", {}, config("replay", 3, bf16={"enabled": True}))
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)

    def step(number: int) -> None:
        engine.backward(engine(run.batch(rank, number, 0)))
        engine.step()

    step(0)
    assert "the first iterations are being recorded" in dict(engine.explain().rows)["replay"]
    engine.trace(f"{folder}/{rank}.json")
    for number in range(1, 5):
        step(number)
        with torch.no_grad():
            engine(run.batch(rank, number, 0))  # evaluation is no part of what is followed
    lines = [line for line in said if "recorded order replayed by plan" in line]
    assert len(lines) == (1 if rank == 0 else 0)
    assert all("x faster than on demand" in line for line in lines)
    rows = dict(engine.explain().rows)
    assert rows["followed"].startswith("2 iterations: 0 left every order")
    assert "predicted step" in rows and "measured step" in rows
    assert "decisions, the most exposed first" in str(engine.explain())
    events = json.loads(pathlib.Path(folder, f"{rank}.json").read_text())["traceEvents"]
    assert {"read", "gather", "gradient", "reduction"} <= {event["cat"] for event in events if event["ph"] == "X"}


def test_the_engine_says_what_became_active_explains_and_traces_it(tmp_path) -> None:
    run_ranks(2, speaks, str(tmp_path))


def diverges(rank: int, world: int) -> None:
    run = DynamicRun("dynamic", config=config("replay", 3), choices=(("depth", 4),) * 4 + (("depth", 1),))
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    for number in range(12):
        engine.backward(engine(run.batch(rank, number, 0)))
        engine.step()
    assert "left every order" in dict(engine.explain().rows)["followed"]
    assert engine.profile.graph.divergences == 2


def test_an_engine_counts_steps_that_leave_the_recorded_order() -> None:
    run_ranks(2, diverges)


def no_plan(rank: int, world: int) -> None:
    run = Run("llama", {}, config("replay", 3, memory_budget=1000))
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    for number in range(4):
        engine.backward(engine(run.batch(rank, number, 0)))
        engine.step()
    assert "gathered on demand: compile: there is no plan" in dict(engine.explain().rows)["replay"]


def test_an_engine_without_a_plan_goes_on_on_demand_and_says_why() -> None:
    run_ranks(2, no_plan)
