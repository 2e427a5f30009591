"""Backwards within an accumulation end without a wait for their reductions, which run on beside the next forward."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist

import deepcompile
from deepcompile import dc
from harness import only_on_cpu, run_ranks
from models import Run, assert_close, losses_with_engine, train_unsharded
from z3_fixture import GRAPH, start

pytestmark = only_on_cpu("on a device every backward orders the next forward after its reductions")

ops = torch.ops.dc

WORKER = {"DEEPCOMPILE_CPU_STREAM": "worker"}


def backward(update: bool, value: float, ids: tuple[int, ...] = (1, 0)) -> None:
    dc.start_backward(update, settle_later=True)
    for index in ids:
        ops.reduce_grad(torch.full((4,), value), GRAPH, index)
    ops.end_backward(GRAPH)


def others_come_later(rank: int, world: int) -> None:
    shards, buffers = start(rank, world, count=2, shape=(4,), bucket_size=4, requires_grad=True)  # two buckets
    store = dist.distributed_c10d._get_default_store()
    backward(False, 1.0)  # the first one is waited for: the ranks learn its order
    assert dc.stats()["backwards_left_running"] == 0
    for turn in range(1, 3):
        if rank == 1:
            store.wait([f"ended {turn}"], datetime.timedelta(seconds=20))
        waits = dc.stats()["waits"]
        backward(False, 1.0 + rank)
        assert dc.stats()["waits"] == waits and dc.stats()["backwards_left_running"] == turn
        if rank == 0:
            store.set(f"ended {turn}", "by rank 0, and rank 1 has no gradient yet")
        # Read while the other rank has only begun: the read waits for it, and so does the next backward.
        if turn == 1:
            assert [shard.grad[0].item() for shard in shards] == [2.5, 2.5]
    backward(True, 1.0 + rank)
    assert [buffer[0].item() for buffer in buffers] == [5.5, 5.5] == [shard.grad[0].item() for shard in shards]
    assert dc.stats()["backwards_left_running"] == 2
    backward(False, 8.0)
    dc.cleanup()  # with the last one still running
    assert [buffer[0].item() for buffer in buffers] == [8, 8] == [shard.grad[0].item() for shard in shards]


def test_a_backward_within_an_accumulation_ends_before_its_reductions_and_reads_of_gradients_wait() -> None:
    run_ranks(2, others_come_later, environment=WORKER)


def surplus_within(rank: int, world: int) -> None:
    shards, buffers = start(rank, world, count=2, shape=(4,), requires_grad=True)
    backward(False, 2.0)
    backward(False, 2.0, (1, 0, 1) if rank == 1 else (1, 0))
    with pytest.raises(RuntimeError, match="within an accumulation while some rank has more of them than expected"):
        shards[0].grad  # noqa: B018
    backward(False, 2.0)
    assert dc.stats()["backwards_left_running"] == 1  # from now on all are waited for
    backward(True, 2.0)
    assert [buffer[0].item() for buffer in buffers] == [8, 9]


@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_gradients_beyond_the_expected_ones_are_reduced_in_their_own_micro_batch(stream: str) -> None:
    run_ranks(2, surplus_within, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def dies_in_the_second(rank: int, world: int) -> None:
    start(rank, world, count=2, shape=(4,), requires_grad=True)
    backward(False, 1.0)
    if rank == 1:
        os._exit(0)
    backward(False, 1.0)  # the reduction fails beside the program
    with pytest.raises(RuntimeError, match="reducing the gradients of 2 parameters.* on rank 0 of 2 failed"):
        backward(True, 1.0)


def test_a_reduction_that_fails_within_an_accumulation_is_an_error_of_the_same_step() -> None:
    run_ranks(2, dies_in_the_second, environment=WORKER, may_die=(1,))


def accumulates(rank: int, world: int, run: Run, waits: bool) -> tuple[list[float], dict, int]:
    model = run.make()
    engine = deepcompile.initialize(model, run.optimizer(model.parameters()), run.config)
    runtime = engine.sharding.runtime
    if waits:
        start_backward = runtime.start_backward
        runtime.start_backward = lambda update, settle_later: start_backward(update)
    losses = losses_with_engine(engine, rank, run)
    state = {name: value.clone() for name, value in deepcompile.full_state_dict(engine.module).items()}
    return losses, state, engine.stats()["backwards_left_running"]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_engine_gets_the_same_bits_with_and_without_the_waits(stage: int) -> None:
    zero = {"stage": stage, "reduce_bucket_size": 500}  # several buckets in a backward
    run = Run(
        "llama",
        {},
        {
            "zero_optimization": zero,
            "compile": {"mode": "off"},
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.5,
            "timeout": 60,
        },
        steps=4,
    )
    losses, state = train_unsharded(run, 2)
    without, waited = (run_ranks(2, accumulates, run, waits, environment=WORKER) for waits in (False, True))
    for rank in range(2):
        assert without[rank][2] == 4 * 2 - 1 and waited[rank][2] == 0  # the very first is waited for
        assert without[rank][0] == waited[rank][0] == pytest.approx(losses[rank], rel=1e-5)
        for name, value in state.items():
            assert torch.equal(without[rank][1][name], waited[rank][1][name])
            assert_close(without[rank][1][name], value, 1e-4, name)
