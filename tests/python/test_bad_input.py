"""Bad input gets an error that names what, where and what to do, and leaves the runtime usable."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepcompile import dc
from deepcompile.runtime import runtime_config
from harness import only_on_cpu, run_ranks
from z3_fixture import GRAPH, gather, release, start, whole_parameter

ops = torch.ops.dc


def rejects_on_one_runtime(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    size = shards[0].numel()

    def rejects(message: str, call, *arguments, **keywords) -> None:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            call(*arguments, **keywords)

    rejects("no graph with id 9.*known ids: 0", ops.allgather_param, shards[0], 9, 0)
    rejects("id 7.*not registered.*does not belong to this graph.*rank", ops.allgather_param, shards[0], GRAPH, 7)
    rejects("id 7", ops.reduce_grad, torch.ones(5, 3), GRAPH, 7)
    rejects(r"n_users is 0 for parameter 'w0'", ops.release_param, torch.empty(0), GRAPH, 0, 0)
    rejects("not being gathered", ops.wait_allgather, torch.empty(0), GRAPH, 0)
    rejects(r"'w1' \(id 1, shape \[5, 3\], Float\).*4 elements instead of 15", ops.reduce_grad, torch.ones(4), GRAPH, 1)
    rejects("'w1'.*dtype Long", ops.reduce_grad, torch.ones(5, 3, dtype=torch.long), GRAPH, 1)
    rejects("2 tensors for 1 ids", ops.prefetch_params_fused, GRAPH, [torch.empty(0)] * 2, [0])
    rejects("1 dtypes for 2", ops.prefetch_params_fused, GRAPH, [torch.empty(0)] * 2, [0, 1], [torch.half])
    rejects("no tensor with id 3 was offloaded", ops.wait_offload, torch.empty(0), GRAPH, 3)
    rejects("no tensor with id 3 was offloaded", ops.reload_tensor, torch.empty(0), GRAPH, 3)

    register = dc.register_z3_param
    rejects(
        "'again' .*id 0.*registered already", register, 0, [5, 3], torch.zeros(size), torch.zeros(size), name="again"
    )
    rejects(f"'w'.*shard has 99 elements.*take {size} on each", register, 5, [5, 3], torch.zeros(99), None, name="w")
    rejects("gradient buffer has 2 elements", register, 5, [5, 3], torch.zeros(size), torch.zeros(2))
    rejects("not contiguous", register, 5, [4, 2], torch.zeros(8 // world * 2)[::2], None)
    rejects("dimension is negative", register, 5, [-1], torch.zeros(1), None)
    rejects(
        "dtype Int cannot be averaged", register, 5, [5, 3], torch.zeros(size), torch.zeros(size, dtype=torch.int32)
    )
    rejects("meta", register, 5, [5, 3], torch.zeros(size, device="meta"), None)
    rejects("whole parameter", dc.register_param, 5, [5, 3], torch.zeros(3), None, 0)
    rejects(
        r"elements \[14, 16\) of a gradient of 15", dc.register_param, 5, [5, 3], torch.zeros(5, 3), torch.zeros(2), 14
    )
    rejects("graph 0 is registered already", dc.register_graph_z3, 0, [0])
    rejects("twice", dc.register_graph_z3, 4, [0, 0])
    rejects("register_z3_param.*ZeRO-1 or 2", dc.register_graph_z1, 4, [0])
    rejects("exists already", dc.init, None, {}, 10)

    assert torch.equal(gather(shards[0], 0), whole_parameter(0))
    release(0)
    dc.register_graph_z3(4, [0, 77])
    rejects("graph 4 lists parameter id 77, which is not registered", dc.start_forward)


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_calls_are_refused_by_name_and_the_runtime_goes_on(world: int) -> None:
    run_ranks(world, rejects_on_one_runtime)


def rejects_configuration(rank: int, world: int) -> None:
    def rejects(kind: type, message: str, *arguments) -> None:
        with pytest.raises(kind, match=message):
            dc.init(*arguments)

    rejects(
        ValueError, "unknown config key 'double_bufer'; did you mean 'double_buffer'", None, {"double_bufer": True}, 10
    )
    rejects(ValueError, "unknown config key 'zzz'; known keys: .*timeout", None, {"zzz": 1}, 10)
    rejects(TypeError, "'debug' must be of type bool, not int", None, {"debug": 1}, 10)
    rejects(TypeError, "'timeout' must be of type float, not str", None, {"timeout": "1"}, 10)
    rejects(TypeError, "config must be a dict", None, 7, 10)
    rejects(TypeError, "initial_reduce_bucket_size", None, {}, 1.5)
    rejects(TypeError, "process_group", "world", {}, 10)
    rejects(ValueError, "initial_reduce_bucket_size is 0", None, {}, 0)
    rejects(ValueError, "'timeout' is -1", None, {"timeout": -1}, 10)
    rejects(RuntimeError, "symmetric_memory needs CUDA", None, {"symmetric_memory": True}, 10)
    rejects(RuntimeError, "registered_memory needs CUDA", None, {"registered_memory": True}, 10)
    rejects(ValueError, "are both set", None, {"symmetric_memory": True, "registered_memory": True}, 10)

    class Settings:
        debug = True  # of the class
        __slots__ = ("timeout",)

        def __init__(self, timeout: float) -> None:
            self.timeout = timeout

    for timeout in (float("inf"), float("nan")):
        rejects(ValueError, "'timeout' is", None, Settings(timeout), 10)
    runtime_config.make_config(Settings(5))
    assert runtime_config.make_config(Settings(5)).debug
    dc.init(None, Settings(5), 10)


@only_on_cpu("refuses what only CUDA has")
def test_bad_configuration_fails_at_init_and_an_object_with_attributes_serves_as_well_as_a_dict() -> None:
    run_ranks(1, rejects_configuration)


def before_init(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match=r"no graph with id 0 is registered.*dc\.init"):
        ops.allgather_param(torch.zeros(3), 0, 0)
    with pytest.raises(RuntimeError, match="call dc.init"):
        ops.free_tensors([torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"dc\.init"):
        dc.start_forward()
    dc.cleanup()


def test_an_operator_before_init_says_so() -> None:
    run_ranks(1, before_init)


def ranks_that_differ(rank: int, world: int, what: str) -> str:
    dc.init(None, {"timeout": 20}, 100)
    odd = rank == 1
    shape = [4, 3] if what == "shape" and odd else [3, 4]
    dtype = torch.float64 if what == "dtype" and odd else torch.float32
    index = 8 if what == "id" and odd else 0
    dc.register_z3_param(index, shape, torch.zeros(12 // world, dtype=dtype), torch.zeros(12 // world), name="w")
    dc.register_graph_z3(0, [index])
    if what == "count" and odd:
        dc.register_z3_param(1, [6], torch.zeros(6 // world), None, name="extra")
    with pytest.raises(RuntimeError) as raised:
        dc.start_forward()
    return str(raised.value)


def ranks_configured_differently(rank: int, world: int, what: str) -> str:
    odd = rank == 1
    dc.init(
        None, {"timeout": 20, "pre_div_reduce": not (odd and what == "average")}, 50 if odd and what == "bucket" else 9
    )
    if what == "stage":
        dc.register_param(0, [4], torch.zeros(4), torch.zeros(4 if rank == 0 else 0), 0)
        (dc.register_graph_z1 if odd else dc.register_graph_z2)(0, [0])
    else:
        dc.register_z3_param(0, [world], torch.zeros(1), None, persistent=odd and what == "persistent")
        dc.register_graph_z3(0, [0, 7] if odd and what == "unknown id" else [0])
    with pytest.raises(RuntimeError) as raised:
        dc.start_forward()
    return str(raised.value)


@pytest.mark.parametrize("what", ["average", "bucket", "stage", "persistent", "unknown id"])
def test_ranks_configured_differently_all_hear_it(what: str) -> None:
    messages = run_ranks(2, ranks_configured_differently, what)
    assert messages[0] == messages[1]
    assert "rank 1 has" in messages[0]


@pytest.mark.parametrize("what", ["shape", "dtype", "id", "count"])
def test_ranks_that_register_differently_all_hear_which_rank_differs_and_in_what(what: str) -> None:
    messages = run_ranks(3, ranks_that_differ, what)
    assert len(set(messages)) == 1
    assert "rank 1 has parameter" in messages[0]
    assert "rank 0 has" in messages[0]


def slices_that_overlap(rank: int, world: int) -> str:
    dc.init(None, {"timeout": 20}, 100)
    dc.register_param(0, [10], torch.zeros(10), torch.zeros(6), 4 * rank, name="w")
    dc.register_graph_z2(0, [0])
    with pytest.raises(RuntimeError) as raised:
        dc.start_forward()
    return str(raised.value)


def test_slices_that_overlap_are_an_error_that_lists_them() -> None:
    for message in run_ranks(2, slices_that_overlap):
        assert "'w'" in message and "rank 0 owns [0, 6)" in message and "rank 1 owns [4, 10)" in message


def a_rank_dies(rank: int, world: int) -> tuple[str, float] | None:
    shards, _ = start(rank, world, config={"timeout": 4})
    dc.start_forward()
    gather(shards[0], 0)
    dc.start_backward(True)
    ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    ops.end_backward(GRAPH)  # the first step ends: from now on the deadline is `timeout`
    dc.start_forward()
    if rank == 1:
        import os

        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        gather(shards[1], 1)
    took = time.monotonic() - begin
    dc.cleanup()
    dist.destroy_process_group()
    return str(raised.value), took


@only_on_cpu("on a device it is the watchdog who says so: test_cuda.py")
@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_a_dead_rank_becomes_an_error_on_the_others_that_names_the_parameter(stream: str) -> None:
    results = run_ranks(3, a_rank_dies, may_die=(1,), environment={"DEEPCOMPILE_CPU_STREAM": stream})
    for rank in (0, 2):
        message, took = results[rank]
        assert f"gathering parameter 'w1' (id 1, shape [5, 3], Float) (graph 0) on rank {rank} of 3 failed" in message
        assert "Check that every rank is alive" in message
        assert took < 4 + 6


def a_rank_stops(rank: int, world: int) -> tuple[str, float] | None:
    shards, _ = start(rank, world, config={"timeout": 2})
    dc.start_backward(True)
    ops.end_backward(GRAPH)
    dc.start_forward()
    if rank == 1:
        time.sleep(9)  # past the deadline of the other: what is tested, not a wait for something
        import os

        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        gather(shards[0], 0)
    return str(raised.value), time.monotonic() - begin


@only_on_cpu("on a device it is the watchdog who says so: test_cuda.py")
@pytest.mark.alone
@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_a_rank_that_does_not_come_becomes_an_error_within_the_deadline(stream: str) -> None:
    message, took = run_ranks(2, a_rank_stops, may_die=(1,), environment={"DEEPCOMPILE_CPU_STREAM": stream})[0]
    assert "gathering parameter 'w0'" in message
    assert 1.5 < took < 2 + 6
