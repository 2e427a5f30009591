"""Sets up and closes the group of ranks behind ``torch.ops.deepspeed.inference_all_reduce``.

It is closed together with the process group that it was made for, so that ``destroy_process_group`` leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from deepcompile.runtime.load import _C


@dataclasses.dataclass(eq=False)
class _Connection:
    size: int
    rank: int
    group: weakref.ref[dist.ProcessGroup] | None  # None if there was no process group (MASTER_ADDR and MASTER_PORT)
    asked_for: bool  # made by dc.initialize, not by init_distributed

    def current(self) -> bool:
        """Whether it belongs to the present default process group."""
        return self.group is None or (dist.is_initialized() and self.group() is dist.group.WORLD)


_connection: _Connection | None = None


def initialize(size: int, rank: int) -> None:
    global _connection
    _check(size, rank)
    existing = _connection
    if existing is not None and existing.current():
        if existing.asked_for:
            raise RuntimeError(
                f"dc.initialize(size={size}, rank={rank}): called already, as rank {existing.rank} of {existing.size}; "
                "once is enough for the life of a process group"
            )
        if (existing.size, existing.rank) != (size, rank):
            raise ValueError(
                f"dc.initialize(size={size}, rank={rank}): init_distributed has made this process rank {existing.rank} "
                f"of {existing.size}"
            )
        existing.asked_for = True
        return
    connect(size, rank, dist.default_pg_timeout, asked_for=True)


def connect(size: int, rank: int, timeout: datetime.timedelta, *, asked_for: bool = False) -> None:
    """A collective. Replaces the existing connection, if any."""
    global _connection
    close()
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        if (size, rank) != (group.size(), group.rank()):
            raise ValueError(
                f"dc.initialize(size={size}, rank={rank}): this process is rank {group.rank()} of {group.size()} in the "
                "process group"
            )
        store = PrefixStore("deepcompile/inference", group.get_group_store())
        _C.set_inference_group(store, rank, size, timeout, group)
        _C.set_inference_owner(group)
        _connection = _Connection(size, rank, weakref.ref(group), asked_for)
        weakref.finalize(group, _close_if, _connection)
        return
    _connect_alone(size, rank, timeout)
    _C.set_inference_owner(None)
    _connection = _Connection(size, rank, None, asked_for)


def _connect_alone(size: int, rank: int, timeout: datetime.timedelta) -> None:
    local = os.environ.get("LOCAL_SIZE")
    if local is not None and local != str(size):
        raise ValueError(
            f"dc.initialize(size={size}, rank={rank}): LOCAL_SIZE is {local}, so the ranks are not all on this host; call "
            "init_distributed first, which serves several hosts"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"dc.initialize(size={size}, rank={rank}): there is no process group, and {' and '.join(missing)} "
            "is not set, where the ranks could meet"
        )
    port = os.environ["MASTER_PORT"]
    store = TCPStore(os.environ["MASTER_ADDR"], int(port), size, rank == 0, timeout)
    meeting = PrefixStore("deepcompile/inference", store)
    try:
        _C.set_inference_group(meeting, rank, size, timeout, None)
    finally:
        # Rank 0 hosts the store, so it waits here until all ranks have read from it.
        meeting.set(f"left/{rank}", "")
        if rank == 0:
            meeting.wait([f"left/{r}" for r in range(size)], timeout)


def _check(size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"dc.initialize(size={size}, rank={rank}): the rank must be at least 0 and below the size")


def _close_if(connection: _Connection) -> None:
    if _connection is connection:
        close()


def close() -> None:
    global _connection
    _connection = None
    _C.clear_inference_owner()
    _C.reset_inference_group()


def serve_otherwise(function: Callable[..., torch.Tensor]) -> None:
    """Sets the fallback for calls of ``inference_all_reduce`` that the native code cannot serve. To find calls after the
    default process group has changed, the native code compares ``distributed_c10d._world``'s attribute ``_default_pg``
    without calling Python.
    """
    _C.set_inference_fallback(function, distributed_c10d._world, "_default_pg")


def connected() -> bool:
    return _connection is not None and _connection.current()
