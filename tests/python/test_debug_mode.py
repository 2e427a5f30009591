"""Debug mode: what would be a wrong number becomes an error that names the parameter."""

from __future__ import annotations

import pytest
import torch

from deepcompile import dc
from harness import only_on_cpu, run_ranks
from z3_fixture import GRAPH, gather, release, start, whole_parameter

ops = torch.ops.dc


def reads_too_early(rank: int, world: int) -> None:
    shards, _ = start(rank, world, config={"debug": True})
    early = ops.allgather_param(shards[0], GRAPH, 0)
    with pytest.raises(RuntimeError, match=r"'w0' \(id 0.*read before wait_allgather \(graph 0, rank"):
        early.sum()
    with pytest.raises(RuntimeError, match="read before wait_allgather"):
        early.t()[0].sum()
    assert torch.equal(ops.wait_allgather(early, GRAPH, 0), whole_parameter(0))
    assert torch.equal(early, whole_parameter(0))


@pytest.mark.parametrize("world", [1, 2])
def test_reading_before_the_wait_is_an_error_that_names_the_parameter(world: int) -> None:
    run_ranks(world, reads_too_early)


def reads_too_late(rank: int, world: int) -> None:
    shards, _ = start(rank, world, config={"debug": True})
    found = gather(shards[0], 0)
    view = found[1:]
    release(0)
    for stale in (found, view):
        with pytest.raises(RuntimeError, match=r"'w0'.*freed by release_param"):
            stale.sum()


@pytest.mark.parametrize("world", [1, 2])
def test_reading_after_the_release_is_an_error_that_names_the_parameter(world: int) -> None:
    run_ranks(world, reads_too_late)


def reads_raw_memory(rank: int, world: int) -> bool:
    """What a compiled kernel that took the address before the release would see."""
    import ctypes

    shards, _ = start(rank, world, config={"debug": True})
    found = gather(shards[0], 0)
    address = found.data_ptr()
    before = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]
    assert before == whole_parameter(0)[0, 0]
    release(0)
    after = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]
    return after != after


@only_on_cpu("reads the memory from the host")
def test_released_memory_reads_as_nan() -> None:
    assert run_ranks(2, reads_raw_memory) == [True, True]


def reduces_too_often(rank: int, world: int) -> None:
    shards, _ = start(rank, world, config={"debug": True})
    dc.start_backward(True)
    with pytest.raises(RuntimeError, match="more reductions than gathers of parameter 'w0'"):
        ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    gather(shards[0], 0)
    ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    with pytest.raises(RuntimeError, match="more reductions than gathers of parameter 'w0'"):
        ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    release(0)
    with pytest.raises(RuntimeError, match="'w0'.*is not gathered by this graph"):
        release(0)
    ops.end_backward(GRAPH)


def test_reductions_without_a_gather_and_releases_without_one_are_errors() -> None:
    run_ranks(2, reduces_too_often)


def ranks_gather_differently(rank: int, world: int) -> str:
    shards, _ = start(rank, world, config={"debug": True})
    with pytest.raises(RuntimeError) as raised:
        gather(shards[rank], rank)
    return str(raised.value)


def test_ranks_that_run_different_collectives_hear_who_meant_what() -> None:
    for message in run_ranks(2, ranks_gather_differently):
        assert "different collectives" in message
        assert "rank 1 has gather of parameters 1" in message
        assert "rank 0 has gather of parameters 0" in message
