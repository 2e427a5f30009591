"""Optimizer states of whole parameters, made before sharding or loaded after it, become this rank's part of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks, where_ranks_run
from models import seeded

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Sizes that no number of ranks divides, a parameter that is a number, and one that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).tanh()) * self.scale * self.one).square().mean()


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, amsgrad=True)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, fused=True)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.02)


def rprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(params, lr=0.02)


OPTIMIZERS = [adagrad, adamw, fused, momentum, nadam, rprop]


def trains(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """The same batch on every rank, so that an unsharded model trains the same."""
    for step in range(first, last):
        model(torch.randn(4, 5, generator=seeded(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(make: Make, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, make(model.parameters())


@where_ranks_run
def unsharded(make: Make, steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = made(make)
    trains(model, optimizer, 0, steps)
    return model.state_dict()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


def config(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, "timeout": 20, "compile": False, **more}


def assert_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for sharded in sharding_of(model).params:
        for slot, value in optimizer.state.get(sharded.param, {}).items():
            is_number = slot in ("step", "mu_product")
            if isinstance(value, torch.Tensor):
                assert value.shape == (() if is_number else sharded.param.shape), (sharded.name, slot)


def before_shard(rank: int, world: int, make: Make, steps: int) -> dict[str, torch.Tensor]:
    deepcompile.shard(nn.Linear(2, 2), config())  # steps are looked at from here on
    model, optimizer = made(make)
    trains(model, optimizer, 0, steps)
    deepcompile.shard(model, config())
    trains(model, optimizer, steps, 5)
    assert_parts(model, optimizer)
    return deepcompile.full_state_dict(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3])
def test_states_made_before_shard_go_on_as_this_ranks_part(make: Make, world: int) -> None:
    expected = unsharded(make, 5)
    for steps in (0, 2):
        assert_same(run_ranks(world, before_shard, make, steps)[0], expected)


def before_initialize(rank: int, world: int, make: Make, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = made(make)
    trains(model, optimizer, 0, 2)
    engine = deepcompile.initialize(model, optimizer, config(**more))
    assert_parts(model, optimizer)
    for step in range(2, 5):
        engine.backward(engine(torch.randn(4, 5, generator=seeded(step))))
        engine.step()
    return deepcompile.full_state_dict(model)


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(("make", "world", "more"), [(adagrad, 2, {}), (fused, 2, OFFLOADED), (adamw, 1, {})])
def test_states_made_before_initialize_go_on_as_this_ranks_part(make: Make, world: int, more: dict[str, Any]) -> None:
    found = run_ranks(world, before_initialize, make, more, environment={"DEEPCOMPILE_OFFLOAD": "always"})[0]
    assert_same(found, unsharded(make, 5))


def half_before(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = Net().bfloat16()
    optimizer = adamw(model.parameters())
    trains_half(model, optimizer)
    engine = deepcompile.initialize(model, optimizer, config(bf16={"enabled": True}))
    engine.backward(engine(torch.ones(4, 5)))
    engine.step()
    for param, state in optimizer.state.items():
        assert state["exp_avg"].dtype == param.dtype == torch.float32


def trains_half(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 5).bfloat16()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_states_follow_the_dtype_of_the_master_copy(world: int) -> None:
    run_ranks(world, half_before)


def loads_whole(rank: int, world: int, make: Make, state: dict, weights: dict) -> dict[str, torch.Tensor]:
    model, optimizer = made(make, seed=8)
    deepcompile.shard(model, config())
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    trains(model, optimizer, 2, 5)
    return deepcompile.full_state_dict(model)


@where_ranks_run
def after_two_steps(make: Make) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model, optimizer = made(make)
    trains(model, optimizer, 0, 2)
    return optimizer.state_dict(), model.state_dict()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_state_of_an_unsharded_optimizer_loads_into_a_sharded_one(make: Make, world: int) -> None:
    found = run_ranks(world, loads_whole, make, *after_two_steps(make))[0]
    assert_same(found, unsharded(make, 5))


def gathers(rank: int, world: int, make: Make) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model, optimizer = made(make)
    deepcompile.shard(model, config())
    trains(model, optimizer, 0, 2)
    state = deepcompile.full_optimizer_state_dict(model, optimizer)
    return copy.deepcopy(state), deepcompile.full_state_dict(model)


@where_ranks_run
def goes_on(make: Make, state: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model, optimizer = made(make, seed=8)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    trains(model, optimizer, 2, 5)
    return model.state_dict()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3])
def test_whole_states_can_be_saved_and_go_on_unsharded(make: Make, world: int) -> None:
    for state, weights in run_ranks(world, gathers, make):
        file = io.BytesIO()
        torch.save(state, file)
        assert_same(goes_on(make, state, weights), unsharded(make, 5))


def parts(rank: int, world: int) -> None:
    model, optimizer = made(adamw)
    deepcompile.shard(model, config())
    trains(model, optimizer, 0, 2)
    state = optimizer.state_dict()
    with pytest.raises(
        RuntimeError, match=r"state 'exp_avg' of parameter 'scale' of shape \[\] .*full_optimizer_state"
    ):
        torch.save(state, io.BytesIO())
    again = adamw(model.parameters())
    again.load_state_dict(copy.deepcopy(state))
    assert {type(value) for kept in again.state.values() for value in kept.values()} == {torch.Tensor}
    before = deepcompile.full_state_dict(model)
    trains(model, optimizer, 2, 4)
    expected = deepcompile.full_state_dict(model)
    model.load_state_dict(before)
    trains(model, again, 2, 4)
    assert_same(deepcompile.full_state_dict(model), {name: value.cpu() for name, value in expected.items()})
    for value, found in (
        (torch.zeros(18), r"has shape \[18\], of which nothing says whether it is this rank's part"),
        (torch.zeros(5, 6), r"has shape \[5, 6\]"),
        (
            state["state"][4]["exp_avg"],
            r"is a part that rank \d of 2 has of state 'exp_avg' of parameter 'second.weight'",
        ),
    ):
        other = copy.deepcopy(state)
        other["state"][2]["exp_avg"] = value
        pattern = rf"AdamW.load_state_dict on rank {rank} of 2: state 'exp_avg' of parameter 'first.weight' .*{found}.*"
        with pytest.raises(RuntimeError, match=pattern + r"here of shape \[7, 5\].*full_optimizer_state_dict"):
            again.load_state_dict(other)


def test_parts_of_states_stay_in_memory_and_foreign_ones_are_refused() -> None:
    run_ranks(2, parts)


class Blocks(torch.optim.SGD):
    """Keeps one number for each row, as optimizers with quantised states do."""


def cannot_be_split(rank: int, world: int) -> None:
    model = nn.Linear(4, 6)
    optimizer = Blocks(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": torch.zeros(6, 4), "rows": torch.zeros(6)}
    deepcompile.shard(model, config())
    model(torch.ones(4)).sum().backward()
    pattern = r"Blocks on rank \d: state 'rows' of parameter 'weight' .*\[6\].*\[6, 4\].*make the optimizer after"
    with pytest.raises(RuntimeError, match=pattern):
        optimizer.step()
    fresh = Blocks(model.parameters(), lr=0.1, momentum=0.9)
    fresh.step()  # states of its own are none of our business
    fresh.state[next(model.parameters())]["rows"] = torch.zeros(6)
    model(torch.ones(4)).sum().backward()
    fresh.step()


def test_states_that_cannot_be_split_are_refused_by_name() -> None:
    run_ranks(2, cannot_be_split)
