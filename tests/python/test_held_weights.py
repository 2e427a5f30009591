"""A weight that a program reads from its module and holds, beyond the forward that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import deepcompile
from harness import run_ranks, where_ranks_run
from models import seeded


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def make() -> tuple[Two, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Two()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=seeded(10 * step + rank))


def loss_of(model: Two, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Weights are read before the forwards and used after them, with gradients and without."""
    held = model.a.weight
    with torch.no_grad():
        constant = model.b.weight.detach()
    y = forward(x)
    y = y + forward(x)
    return y.square().mean() + (x @ held.t()).square().mean() + (x @ constant).square().mean()


MODES = ("plain", "off", "compile", "replay")
STEPS = 5


def holds(rank: int, world: int, stage: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for mode in MODES:
        model, optimizer = make()
        config = {"zero_optimization": {"stage": stage}, "timeout": 30}
        losses = found[mode] = []
        if mode == "plain":
            deepcompile.shard(model, config)
            forward, backward = model, torch.Tensor.backward

            def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()
        else:
            settings = {"mode": mode, "backend": "aot_eager", "profile_steps": 1}
            engine = deepcompile.initialize(model, optimizer, config | {"compile": settings})
            forward, backward, update = engine, engine.backward, engine.step
        for step in range(STEPS):
            loss = loss_of(model, forward, batch(rank, step))
            losses.append(loss.item())
            backward(loss)
            update()
    return found


@where_ranks_run
def unsharded() -> list[list[float]]:
    model, optimizer = make()
    found: list[list[float]] = [[], []]
    for step in range(STEPS):
        losses = [loss_of(model, model, batch(rank, step)) for rank in range(2)]
        for rank, loss in enumerate(losses):
            found[rank].append(loss.item())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_held_weight_is_read_after_the_forward_as_it_was_taken(stage: int) -> None:
    expected = unsharded()
    for rank, found in enumerate(run_ranks(2, holds, stage)):
        for mode in MODES:
            assert found[mode] == pytest.approx(expected[rank], rel=1e-5), mode


def holds_over_an_update(rank: int, world: int, stage: int) -> None:
    model, optimizer = make()
    deepcompile.shard(model, {"zero_optimization": {"stage": stage}, "timeout": 30})
    with torch.no_grad():
        held, copied = model.a.weight, model.a.weight.clone()
    before = copied.clone()
    model(batch(rank, 0)).square().mean().backward()
    optimizer.step()
    model(batch(rank, 1))
    with pytest.raises(RuntimeError, match=r"'a\.weight' .* was gathered again after its shard had changed.*clone\(\)"):
        (held + 0).sum()
    assert torch.equal(copied, before)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_that_is_held_over_an_update_is_an_error_that_names_it(stage: int) -> None:
    run_ranks(2, holds_over_an_update, stage)
