"""Models whose control flow depends on their data, for tests of replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from models import MODELS, Run, seeded


class Experts(nn.Module):
    """Each sample goes to one expert, as its data says: ranks route differently."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = x.detach()[:, :3].argmax(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (route == index).nonzero().flatten()
            if chosen.numel():
                out = out.index_add(0, chosen, expert(x[chosen]))
        return out


class Dynamic(nn.Module):
    """Four layers of which each batch says what is done: ("depth", n), ("drop", mask) or ("again", layer)."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.experts = Experts() if experts else None
        self.head = nn.Linear(8, 3)

    def forward(self, batch: tuple[torch.Tensor, str, int]) -> torch.Tensor:
        x, what, number = batch
        x = torch.tanh(self.first(x))
        for index, layer in enumerate(self.layers):
            if what == "depth" and index >= number:
                break  # early exit
            if what == "drop" and number >> index & 1:
                continue
            x = x + torch.tanh(layer(x))
            if what == "again" and index == number:
                x = torch.tanh(layer(x))
        if self.experts is not None:
            x = x + self.experts(x)
        return self.head(x).square().mean()


MODELS["dynamic"] = Dynamic


@dataclasses.dataclass(frozen=True)
class DynamicRun(Run):
    """``choices``: what each step does, the same on all ranks."""

    choices: tuple[tuple[str, int], ...] = (("depth", 4),)

    def batch(self, rank: int, step: int, micro: int) -> Any:
        generator = seeded(1000 * step + rank)
        what, number = self.choices[step % len(self.choices)]
        return torch.randn(5, 6, generator=generator), what, number

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)  # without memory: a layer that is left out stays as it is
