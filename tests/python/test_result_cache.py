"""A second start finds in the compiler's caches what the first one compiled, and trains to the same bits and plan."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import deepcompile
from deepcompile.compiler import result_cache
from deepcompile.sharding.sharding import sharding_of
from harness import DEVICE, run_ranks
from models import Llama, WithGraphBreak, seeded


class Layers(nn.Module):
    """Weights that begin segments, and norms and biases that do not."""

    def __init__(self, size: int = 64, features: int = 8) -> None:
        super().__init__()
        self.begin = nn.Linear(features, size)
        self.norm = nn.LayerNorm(size)
        self.end = nn.Linear(size, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(torch.tanh(self.norm(self.begin(x)))).square().mean()

    @staticmethod
    def batch(generator: torch.Generator, rows: int = 4, features: int = 8) -> torch.Tensor:
        return torch.randn(rows, features, generator=generator)


MODELS: dict[str, type[Any]] = {"layers": Layers, "llama": Llama, "parts": WithGraphBreak}


@dataclasses.dataclass
class Start:
    """What one rank did in a job."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    plans: list[Any]  # of its steps: the plan's hash, and what each graph reads and gathers when
    hits: int  # of AOTAutograd's cache
    misses: int
    compiled: int  # by Inductor


def start(
    rank: int,
    world: int,
    model: str = "layers",
    options: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    evaluates: bool = False,
    dynamic: bool = False,
    **more: Any,
) -> Start:
    # Without a budget the plan says how much memory was free.
    config = {"compile": {"profile_steps": 0}, "memory_budget": 1 << 30, "timeout": 120} | more
    module = MODELS[model](**(options or {}))
    engine = deepcompile.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1), config)
    losses = []
    data = MODELS[model].batch(seeded(rank), **(batch or {}))
    if dynamic:
        torch._dynamo.mark_dynamic(data, 0)
    for _ in range(3):
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if evaluates:
        with torch.no_grad():
            losses.append(engine(data).item())
    planner = sharding_of(engine.module).planner
    plans = [
        (key, step.saved, step.own_sizes, step.plan and (step.plan.hash, step.plan.graphs))
        for key, step in planner.steps.items()
    ]
    found, inductor = counters["aot_autograd"], counters["inductor"]
    return Start(
        losses,
        {name: value.clone() for name, value in deepcompile.full_state_dict(engine.module).items()},
        plans,
        found["autograd_cache_hit"],
        found["autograd_cache_miss"] + found["autograd_cache_bypass"],
        inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )


def started(world: int, folder: pathlib.Path, *arguments: Any, **settings: Any) -> list[Start]:
    return run_ranks(world, _start, arguments, settings, environment={"TORCHINDUCTOR_CACHE_DIR": str(folder)})


def _start(rank: int, world: int, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Start:
    return start(rank, world, *arguments, **settings)


#: To the same bits; kernels of a device add in the order in which they come.
TOLERANCE = 0.0 if DEVICE == "cpu" else 1e-5


def assert_same_training(first: list[Start], second: list[Start]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=TOLERANCE, abs=0)
        assert one.plans == other.plans
        for name, value in one.parameters.items():
            torch.testing.assert_close(value, other.parameters[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("model", ["layers", pytest.param("llama", marks=pytest.mark.slow)])
def test_second_start_compiles_nothing_and_follows_the_same_plan(model: str, tmp_path: pathlib.Path) -> None:
    cold = started(2, tmp_path, model, evaluates=True)
    warm = started(2, tmp_path, model, evaluates=True)
    assert_same_training(cold, warm)
    for one in warm:
        assert one.plans[0][3] is not None
        assert (one.hits, one.misses, one.compiled) == (2, 0, 0)  # a step, and an evaluation


def test_second_start_of_a_model_in_several_graphs_compiles_nothing(tmp_path: pathlib.Path) -> None:
    cold = started(2, tmp_path, "parts", {"layers": 3})
    warm = started(2, tmp_path, "parts", {"layers": 3})
    assert_same_training(cold, warm)  # equal layers share a graph, and have parameters of their own
    for before, one in zip(cold, warm, strict=True):
        assert one.hits == before.hits + before.misses >= 2
        assert (one.misses, one.compiled) == (0, 0)


def test_other_worlds_shapes_and_dtypes_find_no_result(tmp_path: pathlib.Path) -> None:
    started(2, tmp_path)
    alone = {"zero_optimization": {"gather_at_one_rank": True}}
    others = {
        "three ranks": (3, {}),
        "one rank": (1, alone),
        "another shape": (2, {"options": {"size": 60}}),  # its shards are as large as other shapes' might be
        "bf16": (2, {"bf16": {"enabled": True}}),
    }
    for name, (world, settings) in others.items():
        for one in started(world, tmp_path, **settings):
            assert one.hits == 0, name


def test_results_are_used_again_by_another_configuration_of_the_planner(tmp_path: pathlib.Path) -> None:
    first = started(2, tmp_path)
    other = {"compile": {"profile_steps": 0, "strategy": "on_demand"}}
    for one, before in zip(started(2, tmp_path, **other), first, strict=True):
        assert (one.hits, one.compiled) == (1, 0)
        assert one.losses == pytest.approx(before.losses, rel=TOLERANCE, abs=0)
        assert one.plans[0][3] != before.plans[0][3]


@pytest.mark.parametrize("folder", ["aotautograd", pytest.param("fxgraph", marks=pytest.mark.slow)])
def test_half_a_cache_is_compiled_anew(folder: str, tmp_path: pathlib.Path) -> None:
    cold = started(2, tmp_path)
    shutil.rmtree(tmp_path / folder)
    again = started(2, tmp_path)
    assert_same_training(cold, again)
    assert all(one.hits + one.misses == 1 for one in again)
    assert any(one.misses for one in again)  # the other rank may find what this one has just compiled


def test_a_batch_of_another_size_is_planned_by_its_own_size(tmp_path: pathlib.Path) -> None:
    small, large = (
        started(2, tmp_path, batch={"rows": rows}, dynamic=True, compile={"profile_steps": 0, "dynamic": None})
        for rows in (4, 400)
    )
    for one, other in zip(small, large, strict=True):
        assert other.hits == 0
        assert one.plans[0][2] != other.plans[0][2]  # what the batch needs
    again = started(2, tmp_path, batch={"rows": 400}, dynamic=True)
    assert_same_training(large, again)
    assert all(one.hits == 1 for one in again)


def without_entries(rank: int, world: int) -> Start:
    from torch._functorch._aot_autograd import autograd_cache  # noqa: F401 (with its import the entries are known)

    result_cache._installed = False
    return start(rank, world)


@pytest.mark.slow
def test_where_the_cache_has_other_entries_everything_is_compiled(tmp_path: pathlib.Path) -> None:
    cold = started(2, tmp_path)
    without = run_ranks(2, without_entries, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert_same_training(cold, without)
    assert all(one.hits == 0 for one in without)
