"""Runs a function on several ranks, each a real process with a real process group.

Processes are forked from a server that has torch loaded, so a rank starts in a fraction of a second. The function must be
importable (a module's function, not a lambda); it is called with the rank's number, the number of ranks and the arguments
given, inside an initialised gloo group. What it returns comes back by rank; what it raises fails the test with its rank.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

#: Where the ranks' tensors are made: "cpu", or "cuda" (make test-cuda), where all ranks share the first GPU.
DEVICE = os.environ.get("DEEPCOMPILE_TEST_DEVICE", "cpu")

#: What a test of both kinds of CPU streams runs with.
STREAMS = ["inline", "worker"] if DEVICE == "cpu" else ["auto"]

if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
#: The multi-process service is for the ranks: one that dies ends all that share it, and the tests are to go on.
_service = {name: os.environ.pop(name) for name in ("CUDA_MPS_PIPE_DIRECTORY",) if name in os.environ}
#: For ranks that shall not share one: where there is no service they take turns.
NO_SERVICE = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
_context = multiprocessing.get_context("forkserver")
# A server that has looked for a GPU, as parts of the compiler do when they are loaded, cannot fork processes that use one.
_context.set_forkserver_preload(["deepcompile", "torch._inductor.compile_fx"] if DEVICE == "cpu" else ["torch"])


def use_service(environment: dict[str, str]) -> None:
    """Ranks find another service than the one that the tests were started with."""
    _service.clear()
    _service.update(environment)


def only_on_cpu(why: str) -> pytest.MarkDecorator:
    """Of a test, or of all in a file (``pytestmark``), that says nothing about tensors of a device."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=why)


def where_ranks_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of references that the process of the test computes. A device draws other random numbers than the host, so they must
    be made where the ranks' tensors are; what is returned comes to the host, as the ranks' results do.
    """

    @functools.wraps(function)
    def on_the_device(*arguments: Any, **keywords: Any) -> Any:
        import torch

        with torch.device(DEVICE):
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*arguments, **keywords))

    return on_the_device


class RankFailed(AssertionError):
    """One or more ranks raised, died or did not finish."""


def _rank_main(
    rank: int,
    world: int,
    store_path: str,
    result: Any,
    environment: dict[str, str],
    function: Callable,
    arguments: tuple,
) -> None:
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(store_path, world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
        )
        dist.barrier()  # a rank that leaves at once must not take a connection along that a peer is still making
        value = function(rank, world, *arguments)
        import deepcompile

        deepcompile.dc.cleanup()
        with contextlib.suppress(Exception):  # a test may have taken the group down itself
            dist.destroy_process_group()
        value = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)
        result.send_bytes(pickle.dumps(("ok", value)))
    except BaseException:
        result.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        result.close()
        os._exit(1)  # no waiting for ranks that this one has left behind


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 240,
    environment: dict[str, str] | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """The values that ``function(rank, world, *arguments)`` returned, by rank. None for a rank in ``may_die`` that died."""
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world):
            receive, send = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(
                    rank,
                    world,
                    os.path.join(folder, "store"),
                    send,
                    _service | (environment or {}),
                    function,
                    arguments,
                ),
                daemon=True,
            )
            process.start()
            send.close()
            processes.append(process)
            pipes.append(receive)
        try:
            return _collect(world, pipes, time.monotonic() + timeout, timeout, may_die)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(world: int, pipes: list[Any], deadline: float, timeout: float, may_die: tuple[int, ...]) -> list[Any]:
    __tracebackhide__ = True
    values: list[Any] = [None] * world
    failures: list[str] = []
    waiting = dict(zip(pipes, range(world), strict=True))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.append(f"ranks {sorted(waiting.values())} did not finish within {timeout} s")
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # not recv(): tensors would travel as shared memory
            except EOFError:
                if rank not in may_die:
                    failures.append(f"rank {rank} died without a word")
                continue
            if kind == "ok":
                values[rank] = value
            else:
                failures.append(f"rank {rank} raised:\n{value}")
        if failures:
            deadline = min(deadline, time.monotonic() + 10)  # the others may have more to say, but soon
    if failures:
        raise RankFailed("\n".join(failures))
    return values
