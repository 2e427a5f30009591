"""What programs do with models, each written once and run two ways: unsharded, for all ranks in sequence, and on each rank
through the engine. In 64 bits, so that what differs is wrong and not rounded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import deepcompile
from models import seeded

SIZE = 6
ODD_NAMES = ("a/b", "x=1", "with space, comma", "100%")


class Net(nn.Module):
    """Uneven layers under ``names``, a scalar, and a weight that two places share. ``breaks``: the graph, between layers."""

    def __init__(self, names: Sequence[str], breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(SIZE, SIZE) for name in names})
        self.norm = nn.LayerNorm(SIZE)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(SIZE, SIZE, bias=False)
        self.last.weight = next(iter(self.layers.values())).weight
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(self.norm(x)))
            if self.breaks:
                torch._dynamo.graph_break()
        return self.last(x) * self.scale


class WithLoss(nn.Module):
    """``net`` and the loss of its output; ``teacher``, which is no part of it, gives the target."""

    def __init__(self, net: nn.Module, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net
        self.__dict__["teacher"] = teacher

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = x.roll(1, -1) if self.teacher is None else self.teacher(x)
        return (self.net(x) - target).square().mean()


def batch(rank: int, number: int) -> torch.Tensor:
    # Other numbers of samples on each rank.
    return torch.randn(2 + rank, SIZE, dtype=torch.float64, generator=seeded(100 * number + rank))


class Trainer:
    """One model that trains. Losses come from a function of a callable model and a rank."""

    Loss = Callable[[Callable[..., torch.Tensor], int], torch.Tensor]

    model: nn.Module

    def backward(self, loss: Loss) -> list[float]:
        """One micro-batch. The losses of the ranks that this process stands for."""
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def discard(self, by: str) -> None:
        """What was accumulated is thrown away, through the engine, the optimizer or the model."""
        raise NotImplementedError

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state)

    def state(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Unsharded(Trainer):
    def __init__(self, model: nn.Module, world: int, accumulation: int) -> None:
        self.model, self._world, self._accumulation = model, world, accumulation
        self._optimizer = optimizer_of(model)
        self._done = 0

    def backward(self, loss: Trainer.Loss) -> list[float]:
        losses = [loss(self.model, rank) for rank in range(self._world)]
        (torch.stack(losses).mean() / self._accumulation).backward()
        self._done += 1
        return [one.item() for one in losses]

    def step(self) -> None:
        if self._done % self._accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def discard(self, by: str) -> None:
        self._optimizer.zero_grad()
        self._done = 0

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


class WithEngine(Trainer):
    def __init__(self, model: nn.Module, rank: int, config: dict[str, Any], sharded_before: bool) -> None:
        if sharded_before:
            deepcompile.shard(model, config)
        self.model, self._rank = model, rank
        self.engine = deepcompile.initialize(model, optimizer_of(model), config)

    def backward(self, loss: Trainer.Loss) -> list[float]:
        found = loss(self.engine, self._rank)
        self.engine.backward(found)
        return [found.item()]

    def step(self) -> None:
        self.engine.step()

    def discard(self, by: str) -> None:
        {"engine": self.engine, "optimizer": self.engine.optimizer, "model": self.model}[by].zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return deepcompile.full_state_dict(self.model)


@dataclasses.dataclass
class Program:
    """Makes trainers, and collects what they find. ``breaks``: the models break the compiled graph."""

    make: Callable[[nn.Module, int, bool], Trainer]  # model, accumulation steps, sharded before its engine is made
    shard: Callable[[nn.Module], nn.Module]  # of a model that trains nothing
    breaks: bool
    losses: list[list[float]] = dataclasses.field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)

    def net(self, seed: int = 0, names: Sequence[str] = ("first", "second")) -> Net:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Net(names, self.breaks).double()

    def trainer(self, model: nn.Module, accumulation: int = 1, sharded_before: bool = False) -> Trainer:
        return self.make(model, accumulation, sharded_before)

    def train(self, trainer: Trainer, first: int, last: int) -> None:
        for number in range(first, last):
            self.backward(trainer, lambda model, rank, number=number: model(batch(rank, number)))
            trainer.step()

    def backward(self, trainer: Trainer, loss: Trainer.Loss) -> None:
        self.losses.append(trainer.backward(loss))

    def end(self, *trainers: Trainer) -> None:
        self.states += [copy.deepcopy(trainer.state()) for trainer in trainers]
        for trainer in trainers:
            if isinstance(trainer, WithEngine):
                trainer.engine.close()


#: Steps after which an engine with ``profile_steps`` 2 follows its measured plan.
STEPS = 5


def one_model(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()))
    program.train(trainer, 0, STEPS)
    program.end(trainer)


def two_models_in_a_graph(program: Program) -> None:
    """Of equal names. One is trained, the other gives the targets."""
    teacher = program.net(seed=1).requires_grad_(False)
    trainer = program.trainer(WithLoss(program.net(), program.shard(teacher)))
    program.train(trainer, 0, STEPS)
    program.end(trainer)


def odd_names(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net(names=ODD_NAMES)))
    program.train(trainer, 0, STEPS)
    program.end(trainer)


def sharded_before_initialize(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()), sharded_before=True)
    program.train(trainer, 0, STEPS)
    program.end(trainer)


def loaded_in_the_middle(program: Program) -> None:
    other = WithLoss(program.net(seed=7)).state_dict()
    trainer = program.trainer(WithLoss(program.net()))
    program.train(trainer, 0, 2)
    trainer.load(other)
    program.train(trainer, 2, STEPS)
    trainer.load(other)
    program.train(trainer, STEPS, STEPS + 2)
    program.end(trainer)


def frozen_and_thawed(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()))
    program.train(trainer, 0, 4)
    changed = [param for name, param in trainer.model.named_parameters() if "second" in name]
    for frozen in (True, False):
        for param in changed:
            param.requires_grad_(not frozen)
            if frozen:
                param.grad = None
        program.train(trainer, 4 + 4 * (not frozen), 8 + 4 * (not frozen))
    program.end(trainer)


def gan(program: Program) -> None:
    """A generator and a critic that train in turns, each through the other."""
    generator, critic = program.trainer(program.net()), program.trainer(program.net(seed=3))
    calls: dict[int, Any] = {}

    def callable_of(trainer: Trainer) -> Callable[..., torch.Tensor]:
        return calls.setdefault(id(trainer), getattr(trainer, "engine", trainer.model))

    for number in range(STEPS):

        def judged(model: Any, rank: int, number: int = number) -> torch.Tensor:
            with torch.no_grad():
                made = callable_of(generator)(batch(rank, number))
            return (model(made) - model(batch(rank, 50 + number))).square().mean()

        def fooled(model: Any, rank: int, number: int = number) -> torch.Tensor:
            return callable_of(critic)(model(batch(rank, number))).square().mean()

        program.backward(critic, judged)
        critic.step()
        critic.model.requires_grad_(False)
        program.backward(generator, fooled)
        generator.step()
        critic.model.requires_grad_(True)
    program.end(generator, critic)


def accumulation(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()), accumulation=3)
    program.train(trainer, 0, 3 * STEPS)
    program.end(trainer)


def accumulation_that_ends_early(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()), accumulation=2)
    program.train(trainer, 0, 6)
    for number, by in ((20, "engine"), (30, "optimizer"), (40, "model")):
        program.train(trainer, number, number + 1)
        trainer.discard(by)
        program.train(trainer, number + 2, number + 6)
    program.end(trainer)


def accumulation_that_is_cleared_in_part(program: Program) -> None:
    trainer = program.trainer(WithLoss(program.net()), accumulation=2)
    for number in range(0, 2 * STEPS, 2):
        program.train(trainer, number, number + 1)
        trainer.model.net.layers["second"].zero_grad()
        program.train(trainer, number + 1, number + 2)
    program.end(trainer)


SITUATIONS: dict[str, Callable[[Program], None]] = {
    function.__name__: function
    for function in (
        one_model,
        two_models_in_a_graph,
        odd_names,
        sharded_before_initialize,
        loaded_in_the_middle,
        frozen_and_thawed,
        gan,
        accumulation,
        accumulation_that_ends_early,
        accumulation_that_is_cleared_in_part,
    )
}
