"""Names of parameters may hold any character, and two models in one compiled graph may have parameters of the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks, where_ranks_run
from models import assert_close, seeded

#: As keys of a ModuleDict: what a checkpoint, the texts of plans and of recordings use to tell words apart, and more.
ODD = (
    "a",
    "a/b",
    "a/b/momentum_buffer",
    "x=1",
    "with space",
    "one,two",
    "#5",
    "100%",
    "-",
    "state:a",
    "tab\tand\nline",
    "é",
    "%20",
)


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in ODD})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x.square().mean()


def make() -> nn.Module:
    torch.manual_seed(4)
    return OddNames()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=seeded(10 * step + rank))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@where_ranks_run
def unsharded(world: int, steps: int) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = momentum(model)
    for step in range(steps):
        torch.stack([model(batch(rank, step)) for rank in range(world)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(engine: deepcompile.Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(rank, step)))
        engine.step()


def goes_through_a_checkpoint(rank: int, world: int, folder: str, compile: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = {"zero_optimization": {"stage": 3}, "timeout": 60, "compile": {"profile_steps": 1, **compile}}
    model = make()
    engine = deepcompile.initialize(model, momentum(model), config)
    train(engine, rank, 0, 4)
    engine.save_checkpoint(folder)
    engine.close()
    model = make()
    engine = deepcompile.initialize(model, momentum(model), config)
    engine.load_checkpoint(folder)
    assert all(engine.optimizer.state[s.param].keys() == {"momentum_buffer"} for s in engine.sharding.params)
    train(engine, rank, 4, 8)
    assert "from measured times" in dict(engine.explain().rows)["plan"]
    return {name: value.clone() for name, value in deepcompile.full_state_dict(model).items()}


@pytest.mark.parametrize("compile", [{"backend": "aot_eager"}, {"mode": "replay"}], ids=["compile", "replay"])
def test_names_of_any_characters_are_planned_saved_and_loaded_with_their_states(tmp_path, compile: dict) -> None:
    expected = unsharded(2, 8)
    for found in run_ranks(2, goes_through_a_checkpoint, str(tmp_path), compile):
        for name, value in expected.items():
            assert_close(found[name], value, 1e-5, name)


def recorded_and_loaded(rank: int, world: int, path: str) -> None:
    model = make()
    deepcompile.shard(model, {"timeout": 30})
    with deepcompile.record():
        model(batch(rank, 0)).backward()
    ops = deepcompile.get_recorded_ops()
    again = deepcompile.RecordedOps.parse(ops.text)
    assert again == ops and again.model == ops.model
    graph = deepcompile.compile(ops)
    graph.save(path)
    loaded = deepcompile.CompiledGraph.load(path)
    with loaded.execute():
        model(batch(rank, 1)).backward()
    assert loaded.divergences == 0 and loaded.predicted_step_time == graph.predicted_step_time


def test_a_compiled_graph_of_such_names_is_saved_and_loaded(tmp_path) -> None:
    run_ranks(2, recorded_and_loaded, str(tmp_path / "graph"))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def student_and_teacher() -> tuple[Tower, Tower]:
    torch.manual_seed(3)
    return Tower(), Tower()


def distance(student: nn.Module, teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (student(x) - teacher(x)).square().mean()


def distils(rank: int, world: int, stage: int, backend: str | None, both: bool) -> list[float]:
    """The losses of two models in one graph. ``both`` of them train."""
    student, teacher = student_and_teacher()
    teacher.requires_grad_(both)
    for model in (student, teacher):
        deepcompile.shard(model, {"zero_optimization": {"stage": stage}, "compile": {"backend": backend or "inductor"}})
    params = [p for model in (student, teacher) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5)
    forward = distance if backend is None else torch.compile(distance, backend="deepcompile", fullgraph=True)
    losses = []
    for step in range(4):
        loss = forward(student, teacher, torch.randn(3, 8, generator=seeded(10 * step + rank)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sharding_of(student).graph_id != sharding_of(teacher).graph_id
    return losses


@where_ranks_run
def distilled_unsharded(world: int, both: bool) -> list[list[float]]:
    student, teacher = student_and_teacher()
    teacher.requires_grad_(both)
    optimizer = torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=0.5)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(4):
        own = [distance(student, teacher, torch.randn(3, 8, generator=seeded(10 * step + r))) for r in range(world)]
        for rank, loss in enumerate(own):
            losses[rank].append(loss.item())
        torch.stack(own).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("stage", "backend", "both"),
    [
        (3, None, False), (3, "aot_eager", False), (3, "aot_eager", True), (3, "inductor", False),
        (2, "aot_eager", True), (1, "aot_eager", False),
    ],
)  # fmt: skip
def test_two_models_with_equal_names_in_one_compiled_graph_are_two(stage: int, backend: str | None, both: bool) -> None:
    expected = distilled_unsharded(2, both)
    for rank, losses in enumerate(run_ranks(2, distils, stage, backend, both)):
        assert losses == pytest.approx(expected[rank], rel=1e-5), f"rank {rank}"
