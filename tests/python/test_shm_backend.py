"""The backend ``shm`` as torch.distributed uses it: works and futures, groups, messages, bad input, a clean end."""

from __future__ import annotations

import datetime
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

import deepcompile
import harness
import shm_fixture as fixture
from harness import only_on_cpu

pytestmark = only_on_cpu("shared memory of processes")


def works_and_futures(rank: int, world: int) -> None:
    group = fixture.shm_group()
    total = world * (world + 1) / 2
    # Many in flight, of different sizes; they complete in order.
    tensors = [torch.full((1 + 997 * i,), rank + 1.0) for i in range(30)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors)

    # A synchronous call takes its turn behind asynchronous ones.
    first, second = torch.full((100_000,), rank + 1.0), torch.full((3,), rank + 1.0)
    work = dist.all_reduce(first, group=group, async_op=True)
    dist.all_reduce(second, group=group)
    assert work.is_completed() and second[0] == total

    tensor = torch.full((5,), rank + 1.0)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    (value,) = future.wait()
    assert value.data_ptr() == tensor.data_ptr() and value[0] == total
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert work.get_future().done() and work.is_success()

    # A callback may call collectives and wait for them, as compressed gradients do.
    def again(future: torch.futures.Future) -> torch.Tensor:
        (value,) = future.value()
        return dist.all_reduce(value, group=group, async_op=True).get_future().wait()[0]

    tensor = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    behind = torch.ones(3)
    chained = work.get_future().then(again)
    dist.all_reduce(behind, group=group, async_op=True).wait()
    assert chained.wait()[0] == total * world and behind[0] == world


def overlap(rank: int, world: int) -> None:
    """The caller goes on while rank 0 has not come yet."""
    group = fixture.shm_group()
    tensor = torch.ones(10)
    if rank == 0:
        dist.barrier()  # gloo: the others have passed their call by now
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if rank != 0:
        assert not work.is_completed()
        message = fixture.error_of(lambda: work.wait(datetime.timedelta(milliseconds=20)) and None)
        assert "not complete after the 0.02 s" in message and "all_reduce" in message
        dist.barrier()
    work.wait()
    assert tensor[0] == world


def groups(rank: int, world: int) -> None:
    whole = fixture.shm_group()
    evens = fixture.shm_group(ranks=[0, 2])
    odds = fixture.shm_group(ranks=[1, 3])
    own = evens if rank % 2 == 0 else odds
    for _ in range(20):
        everyone, half = torch.ones(100), torch.full((50,), float(rank))
        works = [dist.all_reduce(everyone, group=whole, async_op=True), dist.all_reduce(half, group=own, async_op=True)]
        for work in works:
            work.wait()
        assert everyone[0] == 4 and half[0] == (2 if rank % 2 == 0 else 4)

    part = whole.split_group([1, 3])
    assert (part is None) == (rank in (0, 2))
    own_half = whole.split_group([0, 2] if rank % 2 == 0 else [1, 3])
    for half_group in filter(None, (part, own_half)):
        assert (half_group.rank(), half_group.size()) == (rank // 2, 2)
        tensor = torch.full((3,), float(rank))
        half_group.allreduce([tensor]).wait()
        assert tensor[0] == (2 if rank % 2 == 0 else 4)

    objects: list = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=whole)
    assert [entry["rank"] for entry in objects] == [0, 1, 2, 3]
    listed = [f"from {rank}", rank]
    dist.broadcast_object_list(listed, 2, whole)
    assert listed == ["from 2", 2]
    gathered: list | None = [None] * world if rank == 1 else None
    dist.gather_object(rank * 10, gathered, 1, whole)
    assert rank != 1 or gathered == [0, 10, 20, 30]
    taken: list = [None]
    dist.scatter_object_list(taken, ["a", "b", "c", "d"] if rank == 0 else None, 0, whole)
    assert taken == ["abcd"[rank]]

    whole.monitored_barrier(datetime.timedelta(seconds=20))
    deepcompile.comm.monitored_barrier(whole, datetime.timedelta(seconds=20))
    deepcompile.comm.monitored_barrier(timeout=datetime.timedelta(seconds=20))  # of gloo


def messages(rank: int, world: int) -> None:
    group = fixture.shm_group()
    right, left = (rank + 1) % world, (rank - 1) % world
    # All send first, more than any buffer holds.
    for size in (0, 1, 1000, 3_000_000):
        received = torch.empty(size)
        work = dist.isend(torch.full((size,), float(rank)), right, group)
        dist.recv(received, left, group)
        work.wait()
        assert torch.equal(received, torch.full((size,), float(left)))
    # A whole batch, into a strided tensor, in any order of tags.
    strided = torch.zeros(20, 6).t()
    ops = [
        dist.P2POp(dist.irecv, strided, left, group),
        dist.P2POp(dist.isend, torch.arange(120.0).view(6, 20) + rank, right, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(strided, torch.arange(120.0).view(6, 20) + left)
    one, two = torch.zeros(3), torch.zeros(3)
    works = [dist.isend(torch.ones(3) * tag, right, group, tag) for tag in (1, 2)]
    dist.recv(two, left, group, 2)
    dist.recv(one, left, group, 1)
    for work in works:
        work.wait()
    assert one[0] == 1 and two[0] == 2
    # From whoever comes.
    if rank == 0:
        sources = set()
        for _ in range(world - 1):
            tensor = torch.zeros(2)
            source = dist.recv(tensor, group=group)
            assert tensor[0] == source
            sources.add(source)
        assert sources == set(range(1, world))
    else:
        dist.send(torch.full((2,), float(rank)), 0, group)


def bad_input(rank: int, world: int) -> None:
    group = fixture.shm_group()
    error = fixture.error_of(dist.all_reduce, torch.zeros(4).to(torch.float8_e4m3fn), group=group)
    assert "Float8_e4m3fn" in error and "gloo" in error
    error = fixture.error_of(dist.all_reduce, torch.zeros(4, dtype=torch.int32), dist.ReduceOp.AVG, group)
    assert "average" in error and "Int" in error
    error = fixture.error_of(dist.all_reduce, torch.ones(3).to_sparse(), group=group)
    assert "dense" in error and "sparse" in error
    error = fixture.error_of(dist.all_reduce, torch.ones(3), dist._make_nccl_premul_sum(2.0), group)
    assert "PREMUL_SUM" in error
    error = fixture.error_of(dist.all_reduce, torch.ones(1).expand(3), group=group)
    assert "single memory location" in error
    output, inputs = torch.zeros(3), torch.zeros(3 * world + 1)
    error = fixture.error_of(dist.reduce_scatter_tensor, output, inputs, group=group)
    assert f"{3 * world + 1} elements" in error
    error = fixture.error_of(group.broadcast, [torch.ones(2)], _broadcast_from(7))
    assert "root 7" in error
    # None of these has hurt the group.
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == world


def _broadcast_from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def mismatches(rank: int, world: int) -> None:
    calls = {
        "sizes": lambda group: dist.all_reduce(torch.ones(4 + rank), group=group),
        "types": lambda group: dist.all_reduce(torch.ones(4).to([torch.float32, torch.float64][rank]), group=group),
        "reductions": lambda group: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group),
        "operations": lambda group: dist.barrier(group) if rank else dist.all_reduce(torch.ones(4), group=group),
        "roots": lambda group: dist.broadcast(torch.ones(4), rank, group),
        "types moved": lambda group: gather_of(torch.float32, torch.int32, group),
        "types that begin alike": lambda group: gather_of(torch.float8_e4m3fn, torch.float8_e4m3fnuz, group),
        "types that end alike": lambda group: gather_of(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, group),
    }

    def gather_of(one: torch.dtype, other: torch.dtype, group: dist.ProcessGroup) -> None:
        dtype = [one, other][rank]
        dist.all_gather_into_tensor(torch.ones(2 * world).to(dtype), torch.ones(2).to(dtype), group)

    sides = {
        "sizes": ("4 elements", "5 elements"),
        "types": ("float32", "float64"),
        "reductions": ("sum", "max"),
        "operations": ("all_reduce", "barrier"),
        "roots": ("root 0", "root 1"),
        "types moved": ("Float", "Int"),
        "types that begin alike": ("e4m3fn)", "e4m3fnuz)"),
        "types that end alike": ("e4m3fnuz)", "e5m2fnuz)"),
    }
    for what, call in calls.items():
        group = fixture.shm_group(10)
        error = fixture.error_of(call, group)
        assert all(side in error for side in (*sides[what], "rank 0", "rank 1")), (what, error)
        # Never a wrong number afterwards: the first error again.
        assert "do not mean the same" in fixture.error_of(dist.all_reduce, torch.ones(2), group=group)
        dist.destroy_process_group(group)


def group_deadline(rank: int, world: int) -> None:
    """Rank 1 does not come: the others' error names it, and says how long they waited."""
    group = fixture.shm_group(30)
    group.set_timeout(datetime.timedelta(seconds=0.5))
    if rank != 1:
        start = time.monotonic()
        error = fixture.error_of(dist.all_reduce, torch.ones(3), group=group)
        assert "rank 1" in error and "0.5 s" in error and time.monotonic() - start < 5, error
    dist.barrier()


def own_deadline(rank: int, world: int) -> None:
    group = fixture.shm_group(60)
    if rank == 0:
        start = time.monotonic()
        options = dist.BarrierOptions()
        options.timeout = datetime.timedelta(seconds=0.4)
        error = fixture.error_of(group.barrier, options)
        assert "0.4 s" in error and "rank 1" in error and time.monotonic() - start < 5, error
        assert "has failed" in fixture.error_of(dist.all_reduce, torch.ones(3), group=group)
    dist.barrier()


def aborts(rank: int, world: int) -> None:
    group = fixture.shm_group(60)
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        future = work.get_future()
        start = time.monotonic()
        group.abort()
        assert "aborted" in fixture.error_of(work.wait) and time.monotonic() - start < 5
        assert "aborted" in fixture.error_of(future.wait)
        assert "shut down" in fixture.error_of(dist.all_reduce, tensor, group=group)
        dist.barrier()
    else:
        dist.barrier()
        assert "rank 0 has aborted" in fixture.error_of(dist.all_reduce, tensor, group=group)


def coalesced_futures(rank: int, world: int) -> None:
    """Of calls that are still under way when the future is asked for."""
    group = fixture.shm_group()
    tensors = [torch.ones(3), torch.ones(5)]
    if rank == 0:
        dist.barrier()
    group._start_coalescing(torch.device("cpu"))
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    future = group._end_coalescing(torch.device("cpu")).get_future()
    if rank != 0:
        assert not future.done()
        dist.barrier()
    assert [value.data_ptr() for value in future.wait()] == [tensor.data_ptr() for tensor in tensors]
    assert tensors[1][4] == world

    group._start_coalescing(torch.device("cpu"))
    assert group._end_coalescing(torch.device("cpu")).get_future().wait() == []


def two_shutdowns_at_once(rank: int, world: int) -> None:
    group = fixture.shm_group()
    tensor = torch.ones(10)
    if rank == 0:
        dist.barrier()
        time.sleep(0.5)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if rank != 0:
        dist.barrier()
    threads = [threading.Thread(target=group.shutdown, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    work.wait()
    assert tensor[0] == world


def shutdown_runs_what_is_queued(rank: int, world: int) -> None:
    group = fixture.shm_group()
    tensors = [torch.ones(10_000) for _ in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    group.shutdown()
    assert all(work.is_completed() for work in works)
    assert all(tensor[0] == world for tensor in tensors)


def again_and_again(rank: int, world: int, folder: str) -> None:
    """Groups come and go, on one and the same store, and leave nothing behind."""
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "store"), world)

    def once() -> None:
        dist.init_process_group("shm", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30))
        tensor = deepcompile.shm.zeros(50_000) + 1
        work = dist.all_reduce(tensor, async_op=True)
        part = dist.new_group([0], backend="shm")
        if rank == 0:
            dist.barrier(part)
        work.wait()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        assert tensor[0] == world
        dist.barrier()
        del part, work
        dist.destroy_process_group()
        gc.collect()

    def found() -> tuple[int, int, int]:
        return fixture.descriptors(), fixture.threads(), mapped()

    once()
    before = found()
    for _ in range(6):
        once()
    deadline = time.monotonic() + 10  # a thread that was joined is counted until the kernel has cleaned up after it
    while any(now > then for now, then in zip(found(), before, strict=True)):
        assert time.monotonic() < deadline, (found(), before)
        time.sleep(0.01)


def mapped() -> int:
    """Mappings of shared memory of ours."""
    with open("/proc/self/maps") as file:
        return sum("deepcompile" in line and ".so" not in line for line in file)


def tensors_in_shared_memory(rank: int, world: int) -> None:
    group = fixture.shm_group()
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu")) and backend.name() == "shm"
    tensor = backend.allocate_tensor(100_000, dtype=torch.float64, device=torch.device("cpu"))
    assert tensor.shape == (100_000,) and deepcompile.shm.is_shared(tensor)
    assert not deepcompile.shm.is_shared(torch.zeros(3))
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor, group=group)
    assert (tensor == world * (world + 1) / 2).all()
    assert deepcompile.shm.is_shared(tensor[5:10]) and not deepcompile.shm.is_shared(tensor.clone())
    zeros = deepcompile.shm.zeros(3, 4, dtype=torch.int16)
    assert zeros.shape == (3, 4) and zeros.dtype == torch.int16 and not zeros.any()
    assert deepcompile.shm.empty((2, 0)).numel() == 0 and deepcompile.shm.empty([5]).shape == (5,)
    # It outlives the group.
    group.shutdown()
    assert tensor.sum() > 0
    tensor.resize_(200_000)
    assert deepcompile.shm.is_shared(tensor)


def test_what_is_pending_when_the_interpreter_ends_does_no_harm():
    """Also where it would run Python, and where the other rank never comes."""
    program = (
        "import sys, torch, torch.distributed as dist, deepcompile\n"
        "rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('shm', store=store, rank=rank, world_size=2)\n"
        "for _ in range(20):\n"
        "    future = dist.all_reduce(torch.ones(300_000), async_op=True).get_future()\n"
        "    future.then(lambda future: print('done', future.value()[0][0].item()))\n"
        "if rank == 0: dist.all_reduce(torch.ones(3), async_op=True).get_future().then(print)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program]
        store = os.path.join(folder, "store")
        ranks = [
            subprocess.Popen([*command, str(rank), store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        ends = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert all(stdout.count("done 2.0") == 20 for stdout, _ in ends), ends


def test_works_complete_in_order_and_futures_carry_the_tensors():
    harness.run_ranks(3, works_and_futures)


def test_one_rank_alone():
    harness.run_ranks(1, works_and_futures)


def test_asynchronous_calls_return_before_the_others_have_come():
    harness.run_ranks(3, overlap)


def test_sub_groups_split_groups_and_object_collectives():
    harness.run_ranks(4, groups)


def test_messages_of_any_size_between_any_ranks():
    harness.run_ranks(3, messages)


def test_bad_input_gets_an_error_that_names_it_and_leaves_the_group_whole():
    harness.run_ranks(2, bad_input)


def test_ranks_that_mean_different_things_all_get_an_error_with_both_sides():
    harness.run_ranks(2, mismatches)


def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group():
    harness.run_ranks(3, group_deadline)


def test_an_operation_has_its_own_timeout():
    harness.run_ranks(2, own_deadline)


def test_abort_fails_what_is_pending_on_all_ranks():
    harness.run_ranks(2, aborts)


def test_coalesced_calls_have_one_future():
    harness.run_ranks(2, coalesced_futures)


def test_two_threads_can_shut_a_group_down_at_once():
    harness.run_ranks(2, two_shutdowns_at_once)


def test_shutdown_waits_for_what_is_queued():
    harness.run_ranks(3, shutdown_runs_what_is_queued)


def test_groups_come_and_go_and_leave_no_descriptor_thread_or_mapping(tmp_path):
    harness.run_ranks(2, again_and_again, str(tmp_path))


def test_tensors_can_live_in_shared_memory():
    harness.run_ranks(2, tensors_in_shared_memory)
