"""Ranks that die, stop, fork or live on another host; and what is left of them."""

from __future__ import annotations

import datetime
import gc
import logging
import multiprocessing
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import deepcompile
import harness
import shm_fixture as fixture
import z3_fixture
from deepcompile import _C
from harness import only_on_cpu

pytestmark = only_on_cpu("shared memory of processes")

HERE = pathlib.Path(__file__).parent


def one_rank_goes(rank: int, world: int, way: str, asynchronous: bool) -> float | None:
    """The seconds after which this rank heard of it."""
    group = fixture.shm_group(60)
    for step in range(20):
        tensor = torch.ones(1 + 5000 * step)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == world
    assert not files_in_shared_memory()
    dist.barrier()
    if rank == 1:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    start = time.monotonic()
    if asynchronous:
        works = [dist.all_reduce(torch.ones(70_000), group=group, async_op=True) for _ in range(3)]
        errors = [fixture.error_of(work.wait) for work in works]
    else:
        errors = [fixture.error_of(dist.all_reduce, torch.ones(70_000), group=group)]
    assert all("rank 1" in error and "ended" in error for error in errors), errors
    return time.monotonic() - start


def one_rank_stops(rank: int, world: int) -> None:
    group = fixture.shm_group(30)
    pids: list = [None] * world
    dist.all_gather_object(pids, os.getpid(), group=group)
    group.set_timeout(datetime.timedelta(seconds=1))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # goes on when rank 0 has seen what it wanted to see
        assert "rank 1" in fixture.error_of(dist.all_reduce, torch.ones(3), group=group)
    elif rank == 0:
        start = time.monotonic()
        try:
            error = fixture.error_of(dist.all_reduce, torch.ones(3), group=group)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert "rank 1" in error and "stopped" in error and time.monotonic() - start < 10, error
    else:
        assert "rank 1" in fixture.error_of(dist.all_reduce, torch.ones(3), group=group)


def one_rank_leaves(rank: int, world: int) -> None:
    group = fixture.shm_group(60)
    dist.barrier(group)
    if rank == 1:
        group.shutdown()
    else:
        error = fixture.error_of(dist.all_reduce, torch.ones(3), group=group)
        assert "rank 1" in error and "left" in error, error
    dist.barrier()


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            gc.collect()
        return torch.tensor(float(index * index))


def forks(rank: int, world: int, store: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # of the harness; those may not fork
    fixture.become_shm(rank, world, store)
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(10), async_op=True)  # the backend has its thread
    work.wait()
    for _ in range(2):  # twice: the second fork finds what the first has left
        loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context="fork")
        total = torch.zeros(())
        for batch in loader:
            total += batch.sum()
            dist.all_reduce(batch)
        dist.all_reduce(total)
        assert total == world * sum(index * index for index in range(12))

    child = os.fork()
    if child == 0:
        # The child cannot use the group, can let go of it, and does not speak for the rank.
        try:
            error = fixture.error_of(dist.all_reduce, torch.ones(3))
            assert "forked child" in error, error
            dist.destroy_process_group()
            del group, work
            gc.collect()
            _C.close_shm_backends(datetime.timedelta(seconds=1))  # as at the end of the interpreter
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == world
    del group
    dist.destroy_process_group()


def files_in_shared_memory() -> list[str]:
    """Of this process: what could be left behind in /dev/shm when it is killed."""
    with open("/proc/self/maps") as file:
        mapped = [line for line in file if "/dev/shm/" in line]
    entries = [entry for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return mapped + [entry.name for entry in entries if os.path.realpath(entry.path).startswith("/dev/shm/")]


def may_not_share_memory(rank: int, world: int) -> list[str]:
    """One rank has no address space for the heaps. Returns what this rank's log says."""
    if rank == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
    error = fixture.error_of(fixture.shm_group)
    assert "rank 1 cannot share memory" in error and "ulimit -v" in error and "gloo" in error, error
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepcompile").addHandler(handler)
    deepcompile.init_distributed()
    assert not deepcompile.comm.uses_shared_memory()
    assert torch.equal(deepcompile.comm.inference_all_reduce(torch.ones(5)), torch.full((5,), float(world)))
    shards, _ = z3_fixture.start(rank, world)
    assert not deepcompile.dc.stats()["shared_memory"]
    assert torch.equal(z3_fixture.gather(shards[0], 0), z3_fixture.whole_parameter(0))
    z3_fixture.release(0)
    assert not deepcompile.shm.is_shared(shards[0])
    if rank == 1:
        with pytest.raises(RuntimeError, match="ulimit -v"):
            deepcompile.shm.empty(10)
    return said


def ends_its_group_in_a_callback(rank: int, world: int) -> None:
    dist.barrier(fixture.shm_group())  # what the first group of a process makes, and keeps
    dist.barrier()
    threads, descriptors = fixture.threads(), fixture.descriptors()
    for _ in range(3):
        group = fixture.shm_group()
        ended = threading.Event()

        def end(_: object, group: dist.ProcessGroup = group, ended: threading.Event = ended) -> None:
            dist.destroy_process_group(group)
            ended.set()

        tensor = torch.full((4,), float(rank))
        work = dist.isend(tensor, 1, group) if rank == 0 else dist.irecv(tensor, 0, group)
        work.get_future().then(end)
        del work, group, end
        assert ended.wait(30)
        assert tensor[0] == 0
        dist.barrier()
    gc.collect()
    deadline = time.monotonic() + 10  # the thread ends after the callback
    # Fewer than at first is right as well: a descriptor of the first group may have been on its way out then.
    while fixture.threads() > threads or fixture.descriptors() > descriptors:
        assert time.monotonic() < deadline, (fixture.threads(), threads, fixture.descriptors(), descriptors)
        time.sleep(0.01)


def forks_with_a_runtime(rank: int, world: int) -> None:
    shards, _ = z3_fixture.start(rank, world)
    assert deepcompile.dc.stats()["shared_memory"]
    z3_fixture.gather(shards[0], 0)
    z3_fixture.release(0)
    child = os.fork()
    if child == 0:
        try:
            error = fixture.error_of(z3_fixture.gather, shards[1], 1)
            assert "forked child" in error, error
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(z3_fixture.gather(shards[1], 1), z3_fixture.whole_parameter(1))
    z3_fixture.release(1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("way", ["killed", "exits"])
def test_a_rank_that_ends_is_named_at_once_and_leaves_nothing(way, asynchronous):
    heard = harness.run_ranks(3, one_rank_goes, way, asynchronous, may_die=(1,))
    assert heard[1] is None and all(heard[rank] < 10 for rank in (0, 2)), heard


@pytest.mark.alone
def test_a_stopped_rank_is_named_after_the_deadline():
    harness.run_ranks(3, one_rank_stops)


def test_a_rank_that_has_left_the_group_is_named():
    harness.run_ranks(2, one_rank_leaves)


def test_data_loaders_may_fork_while_a_group_lives(tmp_path):
    harness.run_ranks(2, forks, str(tmp_path / "store"))


def test_ranks_that_may_not_share_memory_are_served_by_the_process_group_and_told_why():
    said = harness.run_ranks(2, may_not_share_memory)
    assert sum("the runtime communicates through the process group" in line for line in said[0]) == 1, said
    assert all("rank 1 cannot share memory" in line for line in said[0]) and not said[1], said


def test_a_callback_of_a_message_may_end_its_group():
    harness.run_ranks(2, ends_its_group_in_a_callback)


@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_a_forked_child_cannot_use_the_runtimes_communicator(stream):
    harness.run_ranks(2, forks_with_a_runtime, environment={"DEEPCOMPILE_CPU_STREAM": stream})


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("NOT TESTED: ranks on two hosts need root and the program `ip` (Debian's iproute2)")
    names = [f"dc{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED: ranks on two hosts: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_ranks_on_two_hosts_are_told_apart_and_served_by_the_process_group(two_hosts):
    environment = {
        **os.environ,
        "MASTER_ADDR": "10.213.7.1",
        "MASTER_PORT": "29601",
        "GLOO_SOCKET_IFNAME": "cable",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    hosts = [two_hosts[0], two_hosts[0], two_hosts[1]]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, str(HERE / "two_hosts.py"), str(rank), str(len(hosts))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(stderr for _, stderr in ends)
    for said, _ in ends:
        across, untrue = said.strip().splitlines()
        assert "rank 2 does not share the host of rank 0" in across and "gloo" in across
        assert "rank 2 does not share the host of rank 0" in untrue and "init_distributed" in untrue


def test_the_backend_says_so_when_a_rank_does_not_come_to_the_set_up():
    harness.run_ranks(2, nobody_comes)


def nobody_comes(rank: int, world: int) -> None:
    if rank == 0:
        store = dist.HashStore()
        with pytest.raises(RuntimeError, match="rank 1 did not come"):
            _C.make_shm_backend(store, 0, 2, datetime.timedelta(seconds=0.5), "alone", [])
    dist.barrier()
