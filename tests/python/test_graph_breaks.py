"""A step in several compiled graphs is planned as one: gathers start in one graph for the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from harness import DEVICE, only_on_cpu, run_ranks
from models import MODELS, Run, assert_close, seeded, train_unsharded

WORKER = {"DEEPCOMPILE_CPU_STREAM": "worker"}


class Broken(nn.Module):
    """Three parts with a graph break between each two; a batch says whether the second part is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([nn.Linear(24, 24) for _ in range(2)]) for _ in range(3)])
        self.at_border: list[Any] = []

    @torch._dynamo.disable
    def border(self) -> None:
        for call in self.at_border:
            call()

    def forward(self, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
        x, skips = batch
        x = self.part(0, x)
        self.border()
        if not skips:
            x = self.part(1, x)
        self.border()
        return self.part(2, x).square().mean()

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.parts[number]:
            x = x + torch.tanh(layer(x))
        return x


MODELS["broken"] = Broken


@dataclasses.dataclass(frozen=True)
class BrokenRun(Run):
    skips: tuple[int, ...] = ()  # steps

    def batch(self, rank: int, step: int, micro: int) -> Any:
        generator = seeded(100_000 * step + 100 * micro + rank)
        return torch.randn(24, 24, generator=generator), step in self.skips

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate)  # leaves what has no gradient as it is


def trains(rank: int, world: int, run: BrokenRun) -> dict[str, Any]:
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    launched: list[list[int]] = []
    model.at_border.append(lambda: launched[-1].append(engine.stats()["gathers_launched"]))
    losses, live = [], []
    for step in range(run.steps):
        for micro in range(run.accumulation):
            launched.append([engine.stats()["gathers_launched"]])
            loss = engine(run.batch(rank, step, micro))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            launched[-1].append(engine.stats()["gathers_launched"])
            live.append(engine.stats()["gathered_bytes_live"])
    state = {name: value.clone() for name, value in deepcompile.full_state_dict(engine.module).items()}
    explanation, stats = engine.explain(), engine.stats()
    engine.close()
    return {
        "losses": losses,
        "state": state,
        # Of each forward, the gathers that had been started at the borders, and those of the micro-batch.
        "launched": [[count - counts[0] for count in counts[1:]] for counts in launched],
        "live": live[-1],
        "rows": dict(explanation.rows),
        "peak": stats["gathered_bytes_peak"],
        "why": engine.profile.why_not,
    }


def config(backend: str = "aot_eager", **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 3},
        "timeout": 60,
        "compile": {"backend": backend, "profile_steps": 2},
    } | more


OWN = 4  # parameters of each part


def check(run: BrokenRun) -> list[dict[str, Any]]:
    """Trains as the unsharded model does, on all ranks."""
    losses, state = train_unsharded(run, 2)
    found = run_ranks(2, trains, run, environment=WORKER)
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(losses[rank], rel=1e-5)
        for name, value in state.items():
            assert_close(one["state"][name], value, 1e-5, name)
        assert one["live"] == 0 and one["why"] == "", one["why"]
        assert one["launched"] == found[0]["launched"]
    return found


def test_the_first_gathers_of_a_graph_start_in_the_one_before_and_another_branch_stays_right_and_is_counted() -> None:
    # "auto" would gather late where that costs less than a hundredth of what was measured.
    early = config(compile={"backend": "aot_eager", "profile_steps": 2, "strategy": "planned"})
    for one in check(BrokenRun("broken", {}, early, steps=7, skips=(4,))):
        # While nothing but the graphs' own plans is known, each graph gathers for itself.
        assert [borders[:2] for borders in one["launched"][:3]] == 3 * [[OWN, 2 * OWN]]
        # From then on a graph has started gathers for the next one when it ends.
        assert one["launched"][3][0] > OWN
        assert one["launched"][3] == one["launched"][5] == one["launched"][6]
        rows = one["rows"]
        assert rows["compiled"].startswith("the step lies in 6 graphs, 3 of the forward and 3 of the backward")
        assert not rows["across graphs"].startswith("0 gathers")
        # What the step that took another branch had gathered for nothing was let go of.
        assert rows["followed"].startswith("4 iterations: 1 left every order, 0 times went to another, ")
        assert not rows["followed"].endswith(" 0 copies gathered for nothing")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_in_several_graphs_keeps_to_the_memory_budget(backend: str) -> None:
    # Not even the gathered parameters that the backward needs fit together, however long gathers were measured to take.
    run = BrokenRun("broken", {}, config(backend, memory_budget=69_000, gradient_accumulation_steps=2), steps=5)
    whole = sum(param.nbytes for param in run.make().parameters())
    for one in check(run):
        assert one["rows"]["followed"].startswith("4 iterations: 0 left every order")
        assert one["launched"][-1][-1] > 3 * OWN  # again in the backward
        assert one["peak"] < whole


class ReadTwice(nn.Module):
    """One weight is read by a graph without gradients, of what it computes from it, and again by one that trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(24, 24, bias=False), nn.Linear(24, 24)

    @torch._dynamo.disable(recursive=False)
    def without_gradients(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.mixed(x)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.twice.weight * 0.5 + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.once(self.without_gradients(x)))
        torch._dynamo.graph_break()
        return self.twice(y).square().mean()

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(8, 24, generator=generator)


MODELS["read twice"] = ReadTwice


def reads_twice(rank: int, world: int, run: Run) -> dict[str, Any]:
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    losses = []
    for step in range(run.steps):
        loss = engine(run.batch(rank, step, 0))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return {
        "losses": losses,
        "planned": engine.profile.why_not == "" and "across graphs" in dict(engine.explain().rows),
    }


def test_a_graph_without_gradients_leaves_what_it_gathered_to_the_others() -> None:
    # A device's compiler may use memory again that it takes for the graph's own; on CPU none does.
    backend = "aot_eager" if DEVICE == "cpu" else "inductor"
    early = config(compile={"backend": backend, "profile_steps": 2, "strategy": "planned"})
    run = Run("read twice", {}, early, steps=6, learning_rate=0.01)
    losses, _ = train_unsharded(run, 2)
    for rank, one in enumerate(run_ranks(2, reads_twice, run, environment=WORKER)):
        assert one["losses"] == pytest.approx(losses[rank], rel=1e-5)
        assert one["planned"]


def leaves_alone(rank: int, world: int) -> None:
    run = BrokenRun("broken", {}, config(timeout=15), steps=5, skips=(4,) if rank == 1 else ())
    with pytest.raises(RuntimeError, match=r"rank 1 left the recorded order of reads .*'parts\.2\.0\."):
        trains(rank, world, run)


@only_on_cpu("over NCCL a rank that comes alone is told by the watchdog: test_cuda.py")
def test_another_branch_on_one_rank_alone_is_an_error_and_not_a_hang() -> None:
    run_ranks(2, leaves_alone, environment=WORKER)
