"""Runtimes come and go: several in one process, on parts of the world, again and again, and at exit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist

from deepcompile import dc
from harness import DEVICE, only_on_cpu, run_ranks
from z3_fixture import shard_of, start, whole_parameter

ops = torch.ops.dc


def train_on(runtime: dc.Runtime, graph: int, rank: int, world: int, value: float) -> None:
    shard = shard_of(whole_parameter(0), rank, world)
    buffer = torch.zeros(shard.numel())
    runtime.register_z3_param(0, [5, 3], shard, buffer)  # the same parameter id in both runtimes
    runtime.register_graph_z3(graph, [0])
    runtime.start_forward()
    assert torch.equal(ops.wait_allgather(ops.allgather_param(shard, graph, 0), graph, 0), whole_parameter(0))
    ops.release_param(torch.empty(0), graph, 0, 1)
    runtime.end_forward()
    runtime.start_backward(True)
    ops.reduce_grad(torch.full((5, 3), value), graph, 0)
    ops.end_backward(graph)
    mean = torch.tensor([value]) / world
    dist.all_reduce(mean, group=None if world == dist.get_world_size() else _half_group)
    real = min(max(15 - rank * shard.numel(), 0), shard.numel())
    assert torch.allclose(buffer[:real], mean.expand(real))


_half_group: dist.ProcessGroup | None = None


def two_runtimes(rank: int, world: int) -> None:
    global _half_group
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    _half_group = halves[rank // 2]
    whole = dc.init(dist.group.WORLD, {"timeout": 20}, 100)
    half = dc.Runtime(_half_group, {"timeout": 20, "debug": True}, 100)
    for _ in range(1):
        train_on(half, 10, rank % 2, 2, float(rank))
        train_on(whole, 20, rank, world, float(rank))
    with pytest.raises(RuntimeError, match="graph 10 is registered already; .*between runtimes"):
        whole.register_graph_z3(10, [0])
    half_stats, whole_stats = half.stats(), whole.stats()
    assert half_stats["world_size"] == 2 and whole_stats["world_size"] == 4
    assert half_stats["gathers_launched"] == whole_stats["gathers_launched"] == 1
    half.cleanup()
    with pytest.raises(RuntimeError, match="no graph with id 10"):
        ops.end_backward(10)
    with pytest.raises(RuntimeError, match="cleaned up"):
        half.start_forward()
    ops.end_backward(20)


def test_two_runtimes_on_different_groups_do_not_collide() -> None:
    run_ranks(4, two_runtimes)


def part_of_the_world(rank: int, world: int) -> None:
    """Only two of three ranks make a runtime: nothing may need the third."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    dc.init(group, {"timeout": 20}, 100)
    place = 0 if rank == 0 else 1
    shard = shard_of(whole_parameter(0), place, 2)
    dc.register_z3_param(0, [5, 3], shard, None)
    dc.register_graph_z3(0, [0])
    dc.start_forward()
    assert torch.equal(ops.wait_allgather(ops.allgather_param(shard, 0, 0), 0, 0), whole_parameter(0))


def test_a_group_that_is_not_the_whole_world_needs_nobody_else() -> None:
    run_ranks(3, part_of_the_world)


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def footprint() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes in use: of the heap (what is free in it depends on how it came to lie) and shared."""
    process = psutil.Process()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallocInfo
    heap = libc.mallinfo2()
    in_use = heap.uordblks + heap.hblkhd + process.memory_info().shared
    return process.num_fds(), threading.active_count() + process.num_threads(), in_use


def comes_and_goes(rank: int, world: int) -> None:
    def once() -> None:
        shards, _ = start(rank, world, shape=(100, 100))
        dc.start_forward()
        held = ops.wait_allgather(ops.allgather_param(shards[0], 0, 0), 0, 0)
        dc.end_forward()
        dc.start_backward(True)
        ops.reduce_grad(torch.ones(100, 100), 0, 0)
        ops.end_backward(0)
        dc.cleanup()
        del held

    for _ in range(5):
        once()
    before = footprint()
    for _ in range(50):
        once()
    after = footprint()
    assert after[0] <= before[0], "file descriptors grew"
    deadline = time.monotonic() + 10
    while footprint()[1] > before[1]:  # a thread that was joined is counted until the kernel has cleaned up after it
        assert time.monotonic() < deadline, "threads grew"
        time.sleep(0.01)
    assert after[2] - before[2] < 1 << 20, f"memory in use grew by {(after[2] - before[2]) >> 10} KiB"


@only_on_cpu("measures the memory and threads of the process")
@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_init_and_cleanup_fifty_times_leaves_nothing_behind(stream: str) -> None:
    run_ranks(2, comes_and_goes, environment={"DEEPCOMPILE_CPU_STREAM": stream})


EXIT_SCRIPT = """
import torch, torch.distributed as dist
from deepcompile import dc
torch.set_default_device(DEVICE)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dc.init(None, {}, 100)
other = dc.Runtime(None, {}, 100)
w = torch.zeros(4, requires_grad=True)
dc.register_z3_param(0, [4], w, torch.zeros(4))
dc.register_graph_z3(0, [0])
dc.start_forward()
held = torch.ops.dc.wait_allgather(torch.ops.dc.allgather_param(w, 0, 0), 0, 0)
print("end")
"""


def test_a_process_that_cleans_up_nothing_exits_quietly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT.replace("DEVICE", repr(DEVICE))],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def resets(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    ops.allgather_param(shards[0], 0, 0)
    dc.reset()
    assert dc.stats()["gathered_bytes_live"] == 0
    with pytest.raises(RuntimeError, match="no graph with id 0"):
        ops.allgather_param(shards[0], 0, 0)
    dc.register_graph_z3(0, [2, 0])
    assert torch.equal(ops.wait_allgather(ops.allgather_param(shards[0], 0, 0), 0, 0), whole_parameter(0))


def test_reset_forgets_graphs_and_keeps_parameters() -> None:
    run_ranks(2, resets)


def agrees_once(rank: int, world: int, count: int) -> int:
    dc.init(None, {"timeout": 20}, 100)
    for index in range(count):
        dc.register_z3_param(index, [2], torch.zeros(1), None)
    dc.register_graph_z3(0, list(range(count)))
    dc.start_forward()
    dc.end_forward()
    dc.start_forward()
    return dc.stats()["collectives"]["exchange"]


def test_agreement_on_any_number_of_parameters_is_one_collective() -> None:
    assert run_ranks(2, agrees_once, 3) == run_ranks(2, agrees_once, 2000) == [1, 1]


CLASH_SCRIPT = """
import torch
library = torch.library.Library("dc", "DEF")
library.define("mine(Tensor a) -> Tensor")
try:
    import deepcompile
except ImportError as error:
    print(error)
"""


def test_importing_beside_an_owner_of_the_operator_namespace_is_one_clear_error() -> None:
    done = subprocess.run([sys.executable, "-c", CLASH_SCRIPT], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert "owns the operators torch.ops.dc.* (for example dc::mine)" in done.stdout
    assert "cannot share a process" in done.stdout
