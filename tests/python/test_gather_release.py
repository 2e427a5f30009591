"""ZeRO-3: gathering, fused prefetch, waiting, use counts, release, persistence and validity."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from z3_fixture import GRAPH, gather, release, start, whole_parameter

from deepcompile import dc

ops = torch.ops.dc


def gathers_whole_parameters(rank: int, world: int) -> None:
    for shape in ((5, 3), (7,), (1,), (), (0, 4), (2, 3, 1)):
        shards, _ = start(rank, world, count=2, shape=shape)
        for index, shard in enumerate(shards):
            found = gather(shard, index)
            assert found.shape == shape
            assert torch.equal(found, whole_parameter(index, shape))
            assert found.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr() or found.numel() == 0
        dc.cleanup()


@pytest.mark.parametrize("stream", ["inline", "worker"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gather_gives_the_whole_parameter_in_its_true_shape(world: int, stream: str) -> None:
    run_ranks(world, gathers_whole_parameters, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def casts_before_the_gather(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    found = gather(shards[0], 0, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, whole_parameter(0).to(torch.bfloat16))
    assert dc.stats()["bytes_sent"]["all_gather"] == 2 * shards[0].numel() * (world - 1)


def test_a_cast_happens_before_the_gather_so_that_fewer_bytes_travel() -> None:
    run_ranks(2, casts_before_the_gather)


def prefetches(rank: int, world: int) -> None:
    shards, _ = start(rank, world, count=4)
    ops.prefetch_params_fused(GRAPH, [torch.empty(0)] * 3, [0, 1, 3])
    for index in (0, 1, 3):
        assert torch.equal(gather(shards[index], index), whole_parameter(index))
    stats = dc.stats()
    assert stats["collectives"]["all_gather"] == (1 if world > 1 else 0)
    assert (stats["gathers_launched"], stats["gathers_fused"], stats["gathers_reused"]) == (3, 3, 3)
    gather(shards[2], 2)
    assert dc.stats()["gathers_launched"] == 4
    ops.prefetch_params_fused(GRAPH, shards[:2], [0, 1], [torch.float16, torch.bfloat16])
    assert torch.equal(gather(shards[0], 0, torch.float16), whole_parameter(0).half())
    assert torch.equal(gather(shards[1], 1, torch.bfloat16), whole_parameter(1).bfloat16())
    assert dc.stats()["gathers_launched"] == 6
    ops.prefetch_params_fused(GRAPH, [], [])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_fused_prefetch_is_one_collective_and_turns_later_gathers_into_no_ops(world: int) -> None:
    run_ranks(world, prefetches)


def frees_storage(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    first, second = gather(shards[0], 0), gather(shards[1], 1)
    assert dc.stats()["gathered_bytes_live"] > 0
    held = first.untyped_storage()
    assert ops.release_param(second, GRAPH, 0, 1) is second  # the id decides, and the input comes back
    assert held.nbytes() == 0
    with pytest.raises(RuntimeError, match=r"parameter 'w0' \(id 0.*freed by release_param"):
        first.sum()
    assert torch.equal(second, whole_parameter(1))
    release(1)
    stats = dc.stats()
    assert stats["gathered_bytes_live"] == 0
    assert stats["releases"] == 2
    gather(shards[2], 2)
    assert dc.stats()["buffers_reused"] == 1


@pytest.mark.parametrize("world", [1, 2])
def test_release_frees_the_storage_and_the_next_gather_uses_it_again(world: int) -> None:
    run_ranks(world, frees_storage)


def counts_uses(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    for _ in range(2):  # the count starts anew
        found = gather(shards[0], 0)
        for _ in range(2):
            release(0, n_users=3)
            assert torch.equal(found, whole_parameter(0))
        release(0, n_users=3)
        assert dc.stats()["gathered_bytes_live"] == 0
    gather(shards[0], 0)
    release(0, n_users=2)
    for other in (1, 3):
        with pytest.raises(RuntimeError, match="n_users"):
            release(0, n_users=other)
    dc.start_forward()  # a new pass
    release(0, n_users=1)
    assert dc.stats()["gathered_bytes_live"] == 0


def test_storage_is_freed_after_the_last_of_n_users() -> None:
    run_ranks(2, counts_uses)


def shares_between_graphs(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    dc.register_graph_z3(1, [0, 1])
    gather(shards[0], 0)
    found = ops.wait_allgather(ops.allgather_param(shards[0], 1, 0), 1, 0)
    release(0)
    assert torch.equal(found, whole_parameter(0))
    ops.release_param(torch.empty(0), 1, 0, 1)
    assert dc.stats()["gathered_bytes_live"] == 0


def test_storage_stays_while_another_graph_holds_the_parameter() -> None:
    run_ranks(2, shares_between_graphs)


def keeps_persistent(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    dc.set_persistent(0)
    found = gather(shards[0], 0)
    release(0)
    assert torch.equal(found, whole_parameter(0))
    gather(shards[0], 0)
    assert dc.stats()["gathers_launched"] == 1
    dc.invalidate_gathered_param(0)
    assert dc.stats()["gathered_bytes_live"] == 0
    gather(shards[0], 0)
    assert dc.stats()["gathers_launched"] == 2
    gather(shards[1], 1)
    dc.clear_all_gathered_params()
    assert dc.stats()["gathered_bytes_live"] == 0


def test_a_persistent_parameter_stays_until_it_is_invalidated() -> None:
    run_ranks(2, keeps_persistent)


def notices_updates(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    dc.set_persistent(0)
    gather(shards[0], 0)
    with torch.no_grad():
        shards[0] += 1
    assert torch.equal(gather(shards[0], 0), whole_parameter(0) + 1)
    dc.start_backward(True)
    ops.end_backward(GRAPH)
    shards[0].data.mul_(2)  # not seen by the version counter, but an update was announced
    dc.start_forward()
    expected = 2 * (whole_parameter(0) + 1)
    assert torch.equal(gather(shards[0], 0), expected)
    dc.end_forward()
    launched = dc.stats()["gathers_launched"]
    dc.start_forward()
    gather(shards[0], 0)
    dc.end_forward()
    assert dc.stats()["gathers_launched"] == launched


def test_a_gathered_copy_is_invalid_after_the_shard_changed() -> None:
    run_ranks(2, notices_updates)


def regathers_in_backward(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=True)
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    dc.start_forward()
    y = x @ gather(shards[0], 0).t()
    release(0)
    dc.end_forward()
    assert dc.stats()["gathered_bytes_live"] == 0
    dc.start_backward(True)
    y.sum().backward()
    ops.end_backward(GRAPH)
    assert torch.equal(x.grad, whole_parameter(0).sum(0).expand(2, 3))
    assert dc.stats()["gathers_in_backward"] == 1
    assert dc.stats()["gathered_bytes_live"] == 0
    mean = sum(range(1, world + 1)) / world
    expected = torch.full((5 * 3,), 2 * mean)
    size = shards[0].numel()
    found = shards[0].grad
    own = expected[rank * size : (rank + 1) * size]
    assert torch.allclose(found[: own.numel()], own)
    assert not found[own.numel() :].any()


@pytest.mark.parametrize("stream", ["inline", "worker"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_autograd_saved_of_a_released_parameter_is_gathered_again(world: int, stream: str) -> None:
    run_ranks(world, regathers_in_backward, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def refuses_stale_backward(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=True)
    x = torch.ones(2, 3, requires_grad=True)
    dc.start_forward()
    y = x @ gather(shards[0], 0).t()
    release(0)
    dc.end_forward()
    with torch.no_grad():
        shards[0].add_(1)
    dc.start_backward(True)
    with pytest.raises(RuntimeError, match="'w0'.*changed between the forward and the backward"):
        y.sum().backward()


def test_a_backward_over_a_changed_parameter_is_an_error() -> None:
    run_ranks(2, refuses_stale_backward)


def skips_while_profiling(rank: int, world: int) -> None:
    shards, buffers = start(rank, world)
    dc.enable_profiling(True)
    assert dc.is_profiling()
    found = gather(shards[0], 0)
    release(0)
    ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    ops.end_backward(GRAPH)
    activation = torch.ones(20_000_000)
    ops.free_tensors([activation])
    assert torch.equal(found, whole_parameter(0))
    assert not buffers[0].any()
    assert activation[0] == 1
    dc.enable_profiling(False)
    assert not dc.is_profiling()
    release(0)
    assert dc.stats()["gathered_bytes_live"] == 0


def test_reductions_and_frees_are_skipped_while_profiling() -> None:
    run_ranks(2, skips_while_profiling)
