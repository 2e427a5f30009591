"""Ranks whose data takes them through other modules: right inside leaf modules, an error elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from harness import only_on_cpu, run_ranks
from models import seeded


class Experts(nn.Module):
    """Equal experts, of which the batch chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x[0, 0].item() > 0)](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Experts(), nn.Linear(8, 3)
        nn.init.eye_(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    """Each rank chooses anew at each step; from step to step all combinations come."""
    x = torch.randn(4, 8, generator=seeded(10 * step + rank))
    x[:, 0] = 5.0 if (step >> rank) & 1 else -5.0
    return x


def engine_of(model: nn.Module, leaves: list[str], compiles: dict[str, Any]) -> deepcompile.Engine:
    config = {"zero_optimization": {"stage": 3, "leaf_modules": leaves}, "timeout": 60, "compile": compiles}
    return deepcompile.initialize(model, lambda params: torch.optim.SGD(params, lr=0.1), config)


def routed(rank: int, world: int) -> None:
    torch.manual_seed(4)
    model = Model()
    reference = copy.deepcopy(model)
    engine = engine_of(model, ["Experts"], {"backend": "aot_eager", "profile_steps": 1})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        engine.backward(engine(batch(step, rank)))
        engine.step()
        for r in range(world):
            (reference(batch(step, r)) / world).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # an expert without data has zeros here, as it has on the ranks
    found = deepcompile.full_state_dict(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_compiled_code_inside_leaf_modules_may_differ_from_rank_to_rank() -> None:
    run_ranks(2, routed)


def gathers_apart(rank: int, world: int) -> None:
    engine = engine_of(Model(), [], {"enabled": False})
    with pytest.raises(RuntimeError, match=r"middle\.experts\.[01]\.weight.*\n.*zero_optimization\.leaf_modules"):
        engine(batch(1, rank))


@only_on_cpu("over NCCL a collective does not carry what it means (docs/cuda.md, limits)")
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
def test_ranks_that_gather_other_parameters_of_the_same_size_are_told_and_not_given_each_others(communicator) -> None:
    run_ranks(2, gathers_apart, environment={"DEEPCOMPILE_COMMUNICATOR": communicator})
