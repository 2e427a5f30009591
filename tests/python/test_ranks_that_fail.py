"""A rank that raises, dies or is missing outside the steps: the others hear of it at once or within ``timeout``, by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepcompile
from deepcompile.runtime.group_transfers import GroupTransfers
from harness import only_on_cpu, run_ranks
from models import MLP

pytestmark = only_on_cpu("is about what the host waits for")

TIMEOUT = 6.0
#: Of a machine that has other work; a tenth of what a first step may take.
SLACK = 5.0


def config(stage: int = 3, timeout: float = TIMEOUT) -> dict:
    return {"zero_optimization": {"stage": stage}, "timeout": timeout, "compile": False}


def told(call: Callable[[], object]) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(Exception) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - begin


def change(model: nn.Module, rank: int, odd: Callable[[], None]) -> None:
    with deepcompile.full_params(model), torch.no_grad():
        model.scale.fill_(7.0)
        if rank == 1:
            odd()


def raises_inside(rank: int, world: int, stage: int, way: str) -> tuple[str, float]:
    def odd() -> None:
        if way == "raises":
            raise ValueError("no more of this")
        model.scale = nn.Parameter(torch.zeros(()))

    torch.manual_seed(0)
    model = deepcompile.shard(MLP(), config(stage, timeout=60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = told(lambda: change(model, rank, odd))
    assert deepcompile.full_state_dict(model)["scale"].item() == 1.5  # nothing was written back
    model(torch.ones(4, 7)).backward()
    optimizer.step()
    again = told(lambda: change(model, rank, odd))
    assert again[0] == found[0]
    return found[0], max(found[1], again[1])


@pytest.mark.parametrize("way", ["raises", "replaces"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_fails_inside_full_params_is_named_on_the_others_at_once(stage: int, way: str) -> None:
    own = "ValueError: no more of this" if way == "raises" else "'scale' of MLP was replaced inside full_params"
    for rank, (message, took) in enumerate(run_ranks(3, raises_inside, stage, way)):
        assert own in message
        assert message.startswith("PeerFailed") == (rank != 1)
        assert rank == 1 or f"rank {rank} has left full_params, and rank 1 failed there" in message
        assert took < SLACK


def dies_inside(rank: int, world: int) -> tuple[str, float]:
    model = deepcompile.shard(MLP(), config())
    return told(lambda: change(model, rank, lambda: os._exit(3)))


def does_not_enter(rank: int, world: int) -> tuple[str, float] | None:
    model = deepcompile.shard(MLP(), config())
    if rank == 1:
        time.sleep(TIMEOUT + 2 * SLACK)
        os._exit(0)
    return told(lambda: deepcompile.full_state_dict(model))


def does_not_shard(rank: int, world: int) -> tuple[str, float] | None:
    if rank == 1:
        time.sleep(TIMEOUT + 2 * SLACK)
        os._exit(0)
    return told(lambda: deepcompile.shard(MLP(), config()))


def dies_between_scatters(rank: int, world: int) -> tuple[str, float] | None:
    transfers = GroupTransfers(dist.group.WORLD, TIMEOUT)
    transfers.scatter(torch.ones(4), 0, "parameter 'first'")
    if rank == 1:
        os._exit(0)
    return told(lambda: [transfers.scatter(torch.ones(100_000), 0, "parameter 'second'") for _ in range(4)])


def stops_between_scatters(rank: int, world: int) -> tuple[str, float] | None:
    transfers = GroupTransfers(dist.group.WORLD, TIMEOUT)
    transfers.scatter(torch.ones(4), 0, "parameter 'first'")
    if rank == 0:
        time.sleep(TIMEOUT + 2 * SLACK)
        os._exit(0)
    return told(lambda: transfers.scatter(torch.ones(4), 0, "parameter 'second'"))


def stops_while_it_shards(rank: int, world: int) -> tuple[str, float] | None:
    scatter = GroupTransfers.scatter

    def stops(self: GroupTransfers, whole: torch.Tensor, source: int, what: str) -> torch.Tensor:
        if rank == 0 and what == "parameter 'layers.0.weight'":
            time.sleep(TIMEOUT + 2 * SLACK)
            os._exit(0)
        return scatter(self, whole, source, what)

    GroupTransfers.scatter = stops  # type: ignore[method-assign]
    return told(lambda: deepcompile.shard(MLP(), config()))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "missing", "message"),
    [
        (dies_inside, 1, "has left full_params, and rank 1 did not within 6 seconds"),
        (does_not_enter, 1, "waited 6 s for rank 1"),
        (does_not_shard, 1, "is about to shard a MLP, and rank 1 did not within 6 seconds"),
        (dies_between_scatters, 1, "scattering parameter 'second' failed on rank"),
        (stops_between_scatters, 0, "within 6 seconds: rank 0 did not answer"),
        (stops_while_it_shards, 0, "scattering parameter 'layers.0.weight' failed on rank"),
    ],
)
def test_a_rank_that_is_missing_outside_the_steps_is_an_error_within_the_timeout(
    what: Callable, missing: int, message: str
) -> None:
    results = run_ranks(3, what, may_die=(missing,))
    for rank in {0, 1, 2} - {missing}:
        assert message in results[rank][0]
        assert results[rank][1] < TIMEOUT + SLACK


def refuses_alone(rank: int, world: int) -> tuple[str, float]:
    model = MLP()
    if rank == 1:
        model.scale.register_hook(lambda gradient: gradient)
    found = told(lambda: deepcompile.shard(model, config(timeout=60)))
    deepcompile.shard(MLP(), config())  # the ranks meet again
    return found


def test_a_model_that_one_rank_refuses_is_an_error_on_all_at_once() -> None:
    for message, took in run_ranks(3, refuses_alone):
        assert "parameter 'scale' has a hook" in message
        assert took < SLACK


def second_step(rank: int, world: int) -> tuple[str, float] | None:
    model = deepcompile.shard(MLP(), config(timeout=3.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 7)).backward()
    optimizer.step()
    if rank == 1:
        time.sleep(3.0 + 2 * SLACK)
        os._exit(0)
    return told(lambda: model(torch.ones(4, 7)))


@pytest.mark.alone
def test_the_longer_deadline_of_the_first_step_ends_with_it_in_the_plain_loop() -> None:
    message, took = run_ranks(2, second_step, may_die=(1,))[0]
    assert "parameter" in message and took < 3.0 + SLACK


def every_dtype(rank: int, world: int) -> None:
    transfers = GroupTransfers(dist.group.WORLD, 20.0)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool, torch.float64):
        whole = torch.arange(7, device="cpu").to(dtype)
        given = whole if rank == 1 else torch.zeros_like(whole)
        own = transfers.scatter(given, 1, "it")
        padded = torch.cat([whole, torch.zeros(2, dtype=dtype)])
        assert own.dtype == dtype and torch.equal(own, padded[3 * rank : 3 * rank + 3])
        assert torch.equal(transfers.gather(own, "it"), padded)
        given = given.clone().view(7, 1).t()
        transfers.broadcast(given, 1, "it")
        assert torch.equal(given, whole.view(1, 7))
    number = torch.tensor(5 if rank == 0 else 3)
    transfers.broadcast(number, 0, "a number")
    assert number.item() == 5


def test_one_rank_sends_the_others_tensors_of_every_dtype() -> None:
    run_ranks(3, every_dtype)
