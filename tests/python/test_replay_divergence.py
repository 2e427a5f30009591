"""Steps that leave the recorded order: right, counted, said once, learned; and an error where a rank does it alone."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from dynamic_models import DynamicRun
from harness import only_on_cpu, run_ranks
from models import assert_close, train_unsharded


def messages() -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepcompile")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return found


def replayed(rank: int, world: int, run: DynamicRun, stage: int, leaves: list[str]) -> dict[str, Any]:
    """Records the first step and replays the others."""
    said = messages()
    model = run.make()
    config = {"zero_optimization": {"stage": stage, "leaf_modules": leaves}, "timeout": 20}
    deepcompile.shard(model, config)
    optimizer = run.optimizer(model.parameters())
    losses, counts = [], []

    def iteration(step: int) -> None:
        loss = model(run.batch(rank, step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    with deepcompile.record():
        iteration(0)
    graph = deepcompile.compile(prefetch_ahead="auto")
    for step in range(1, run.steps):
        with graph.execute():
            iteration(step)
        counts.append(graph.divergences)
    stats = sharding_of(model).runtime.stats()
    state = {name: value.clone() for name, value in deepcompile.full_state_dict(model).items()}
    sharding_of(model).close()
    return {
        "losses": losses,
        "state": state,
        "counts": counts,
        "variants": graph.variants,
        "said": said,
        "live": stats["gathered_bytes_live"],
        "followed": dict(graph.rows())["followed"],
    }


def check(run: DynamicRun, stage: int = 3, world: int = 2, leaves: tuple[str, ...] = ()) -> dict[str, Any]:
    """Trains as the unsharded model does, on all ranks; what rank 0 found."""
    by_rank = run_ranks(world, replayed, run, stage, list(leaves))
    losses, state = train_unsharded(run, world)
    for rank, found in enumerate(by_rank):
        assert found["losses"] == pytest.approx(losses[rank], rel=1e-5)
        for name, value in found["state"].items():
            assert_close(value, state[name], 1e-5, name)
        assert found["counts"] == by_rank[0]["counts"]
        if stage == 3 and not leaves:
            assert found["live"] == 0  # nothing that was gathered ahead is left behind
    return by_rank[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_early_exit_on_all_ranks_is_right_counted_and_said_once(stage: int) -> None:
    run = DynamicRun("dynamic", steps=6, choices=(("depth", 4), ("depth", 2), ("depth", 4), ("depth", 2)))
    found = check(run, stage)
    assert found["counts"] == [1, 1, 2, 2, 3]
    said = [line for line in found["said"] if "left the recorded order" in line]
    assert len(said) == 1
    assert "'layers.2.weight' (forward)" in said[0]
    assert "read 6 was 'head.weight' (forward)" in said[0] if stage == 3 else True


def test_an_order_that_comes_again_is_recorded_and_both_are_kept() -> None:
    choices = (("depth", 4), ("depth", 2))
    found = check(DynamicRun("dynamic", steps=16, choices=choices))
    assert found["variants"] == 2
    assert found["counts"][-1] == 3 and found["counts"][-8:] == [3] * 8  # then both orders are known
    assert any("is planned as well" in line for line in found["said"])
    assert " 3 left every order" in found["followed"]


def counts_recordings(rank: int, world: int) -> None:
    from deepcompile.replay import compiled_graph, recording

    started: list[int] = []

    class Counted(recording.Recording):
        def __init__(self, *args: Any, **more: Any) -> None:
            started.append(1)
            super().__init__(*args, **more)

    recording.Recording = Counted
    run = DynamicRun("dynamic")
    model = run.make()
    deepcompile.shard(model, {"timeout": 20})
    optimizer = run.optimizer(model.parameters())

    def iterations(*depths: int) -> int:
        """How many of them were recorded."""
        before = len(started)
        for depth in depths:
            x, what, _ = run.batch(rank, 0, 0)
            with graph.execute() if graph is not None else deepcompile.record():
                model((x, what, depth)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return len(started) - before

    graph = None
    assert iterations(4) == 1
    graph = deepcompile.compile()
    assert iterations(4, 2, 4, 2, 4) == 1  # twice is often enough to wait for the third
    assert iterations(*[4] * compiled_graph.MOST_AWAITED) == compiled_graph.MOST_AWAITED - 1
    assert iterations(4, 4, 2) == 0 and graph.variants == 1  # it came late, and is waited for again
    assert iterations(4, 2) == 2 and graph.variants == 2
    assert iterations(4, 2, 4) == 0 and graph.divergences == 4


def test_an_order_that_does_not_come_again_is_not_recorded_for_ever() -> None:
    run_ranks(2, counts_recordings)


def test_layers_dropped_at_random_and_additional_calls_train_as_unsharded() -> None:
    generator = random.Random(3)
    choices = [("depth", 4)] + [("drop", generator.randrange(16)) for _ in range(9)] + [("again", 1), ("again", 3)]
    found = check(DynamicRun("dynamic", steps=12, choices=tuple(choices)), world=3)
    different = sum(choice not in (("depth", 4), ("drop", 0)) for choice in choices)
    assert found["counts"][-1] == different


def test_experts_that_ranks_route_differently_need_no_agreement_as_leaf_modules() -> None:
    run = DynamicRun("dynamic", {"experts": True}, steps=8)
    for stage in (2, 3):
        found = check(run, stage, leaves=("Experts",))
        assert found["counts"][-1] == 0


def alone(rank: int, world: int, backend: str) -> tuple[str, float]:
    run = DynamicRun("dynamic", steps=4)
    model = run.make()
    deepcompile.shard(model, {"timeout": 3})
    optimizer = run.optimizer(model.parameters())

    def iteration(batch: Any) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with deepcompile.record():
        iteration(run.batch(rank, 0, 0))
    graph = deepcompile.compile(prefetch_ahead=1)
    for step in (1, 2):
        with graph.execute():
            iteration(run.batch(rank, step, 0))
    x, _, _ = run.batch(rank, 3, 0)
    started = time.monotonic()
    try:
        with graph.execute():
            iteration((x, "depth", 2 if rank == 1 else 4))
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@only_on_cpu("over NCCL a rank that comes alone is told by the watchdog: test_cuda.py")
@pytest.mark.alone
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
def test_a_rank_that_leaves_the_order_alone_is_named_on_all_ranks_within_the_deadline(communicator: str) -> None:
    first, second = run_ranks(2, alone, communicator, environment={"DEEPCOMPILE_COMMUNICATOR": communicator})
    assert "rank 1 left the recorded order of reads" in first[0] and "leaf_modules" in first[0]
    assert "rank 1 left the recorded order of reads" in second[0] and "rank 0 did not within 3 seconds" in second[0]
    for words, seconds in (first, second):
        assert "'head.weight' (forward) where order 0 has 'layers.2.weight' (forward)" in words
        assert seconds < 15


def raises_inside(rank: int, world: int) -> None:
    run = DynamicRun("dynamic", steps=4)
    model = run.make()
    deepcompile.shard(model, {"timeout": 20})
    optimizer = run.optimizer(model.parameters())

    def iteration(step: int) -> None:
        model(run.batch(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with deepcompile.record():
        iteration(0)
    graph = deepcompile.compile()
    with pytest.raises(ZeroDivisionError), graph.execute():
        model(run.batch(rank, 1, 0))
        raise ZeroDivisionError
    for step in (1, 2):
        with graph.execute():
            iteration(step)
    assert graph.divergences == 0
    assert sharding_of(model).runtime.stats()["gathered_bytes_live"] == 0
    with graph.execute(), torch.no_grad():
        model(run.batch(rank, 3, 0))  # a forward alone
    assert graph.divergences == 1


def test_an_error_of_the_program_ends_the_iteration_and_the_next_is_followed_again() -> None:
    run_ranks(2, raises_inside)


class FailsOrTurns(nn.Module):
    """Two layers, in either order; ``fails`` in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.turned = self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.second, self.first) if self.turned else (self.first, self.second)
        x = layers[0](x)
        if self.fails:
            raise ValueError("on purpose")
        return layers[1](x).square().mean()


def fails_while_it_records(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = FailsOrTurns()
    deepcompile.shard(model, {"timeout": 20})

    def iteration() -> None:
        model(torch.ones(2, 16)).backward()

    with deepcompile.record():
        iteration()
    graph = deepcompile.compile()
    model.turned = True
    for _ in range(2):  # the third of its kind is awaited from here on, so iterations are recorded
        with graph.execute():
            iteration()
    model.turned, model.fails = False, True
    with pytest.raises(ValueError, match="on purpose"), graph.execute():
        iteration()
    assert not sharding_of(model).runtime.trace.on
    model.turned, model.fails = True, False
    with graph.execute():
        iteration()
    assert graph.variants == 2 and not sharding_of(model).runtime.trace.on


def test_an_iteration_that_fails_while_it_is_recorded_leaves_nothing_that_reads_the_trace() -> None:
    run_ranks(2, fails_while_it_records)
