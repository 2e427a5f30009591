"""Ranks whose batches have other shapes train compiled as the unsharded model does, and plan alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import deepcompile
from deepcompile.planning.batch_sizes import BatchSizes, over_all
from harness import run_ranks
from models import Run, assert_close, seeded, train_unsharded


@dataclasses.dataclass(frozen=True)
class Ragged(Run):
    """Each rank has sequences of its own length."""

    lengths: str = "fixed"  # by rank; or "varying" with the step; or varying on the last rank "alone"
    world: int = 2

    def length(self, rank: int, step: int) -> int:
        if self.lengths == "fixed":
            return (9, 24, 5)[rank]
        if self.lengths == "alone":
            return 9 if rank < self.world - 1 else (9, 17, 9, 33, 12)[step % 5]
        return (9, 17, 9, 33, 12)[(step + 2 * rank) % 5]

    def batch(self, rank: int, step: int, micro: int) -> torch.Tensor:
        generator = seeded(100_000 * step + 100 * micro + rank)
        samples = 1 + rank  # and other numbers of samples
        return torch.randint(0, 31, (samples, self.length(rank, step)), generator=generator)


def trains(rank: int, world: int, run: Ragged) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    losses = []
    for step in range(run.steps):
        loss = engine(run.batch(rank, step, 0))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    step = engine.sharding.planner.training_step()
    planned = {"rows": dict(engine.explain().rows)}
    if step is not None and step.plan is not None:
        planned |= {"measured": step.measured, "hash": step.plan.hash, "graph": step.plan.planned.graph.hash}
    return losses, {name: value.clone() for name, value in deepcompile.full_state_dict(model).items()}, planned


def config(backend: str = "aot_eager", stage: int = 3, budget: str | None = None, **compile: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "timeout": 60,
        "compile": {"backend": backend, **compile},
        "memory_budget": budget,
    }


CASES = [
    ("fixed", 2, config(budget="least")),
    ("varying", 2, config()),
    ("alone", 2, config()),
    ("varying", 3, config(stage=1)),
    ("fixed", 3, config(stage=2)),
    ("varying", 2, config(mode="replay")),
    ("varying", 2, config(dynamic=True)),
]


def assert_trains_as_unsharded(run: Ragged) -> list[dict[str, Any]]:
    losses, state = train_unsharded(run, run.world)
    found = run_ranks(run.world, trains, run)
    for rank, (own, parameters, _) in enumerate(found):
        assert own == pytest.approx(losses[rank], rel=1e-4)
        for name, value in state.items():
            assert_close(parameters[name], value, 1e-4, name)
    return [planned for _, _, planned in found]


@pytest.mark.parametrize(("lengths", "world", "settings"), CASES)
def test_ranks_with_batches_of_other_shapes_train_as_unsharded(lengths: str, world: int, settings: dict) -> None:
    # Two steps are measured and planned from; then shapes that were compiled before and new ones come.
    settings["compile"]["profile_steps"] = 2
    run = Ragged("llama", {"layers": 2, "size": 32}, settings, steps=9, lengths=lengths, world=world)
    planned = assert_trains_as_unsharded(run)
    if settings["compile"].get("mode") != "replay":
        assert all(one["measured"] for one in planned), planned[0]["rows"]
        assert len({(one["hash"], one["graph"]) for one in planned}) == 1, "planned from the same numbers"


def test_ranks_with_batches_of_other_shapes_train_as_unsharded_by_inductor() -> None:
    settings = config("inductor", profile_steps=1)
    run = Ragged("llama", {"layers": 1, "size": 32}, settings, steps=5, lengths="varying")
    planned = assert_trains_as_unsharded(run)
    assert all(one["measured"] for one in planned), planned[0]["rows"]


def test_what_ranks_plan_from_is_the_most_bytes_of_any_and_the_median_of_times() -> None:
    ranks = [
        BatchSizes({"forward": [1.0, 2.0]}, {"forward": [10, 40]}, {(0, 1): 5}),
        BatchSizes({"forward": [3.0, 2.0]}, {"forward": [30, 20]}, {(0, 1): 7, (1, 1): 2}),
        BatchSizes({"forward": [5.0, 9.0]}, {"forward": [20, 20]}, {}),
    ]
    found = over_all([BatchSizes.parse(one.text) for one in ranks])
    assert found.seconds == {"forward": [3.0, 2.0]} and found.workspace == {"forward": [30, 40]}
    assert found.saved == {(0, 1): 7, (1, 1): 2}
