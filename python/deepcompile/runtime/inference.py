"""The group of ranks behind ``torch.ops.deepspeed.inference_all_reduce``: when it is set up, and when it ends.

It ends with the process group that it stands beside, so that ``destroy_process_group`` leaves nothing behind.
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
    group: weakref.ref[dist.ProcessGroup] | None  # None where the ranks met in a store of their own
    asked_for: bool  # by dc.initialize, not by init_distributed

    def current(self) -> bool:
        """Whether it belongs to the process group of now."""
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
    """Collective. Replaces what there is."""
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
        # The store ends with rank 0, so it stays until all have read the outcome.
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
    """``function`` gets the calls of ``inference_all_reduce`` that cannot be served directly: those of ranks that no longer
    belong to the process group of now, which the native code must find without a call of Python's, among others.
    """
    _C.set_inference_fallback(function, distributed_c10d._world, "_default_pg")


def connected() -> bool:
    return _connection is not None and _connection.current()
