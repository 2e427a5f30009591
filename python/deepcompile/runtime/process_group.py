"""Makes the default process group if the program has made none: of the launcher's ranks, else of this process alone.

A group made here is destroyed when the program exits, after everything that uses it (:mod:`deepcompile.dc`).
"""

from __future__ import annotations

import datetime
import logging
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from deepcompile.runtime import channels

_log = logging.getLogger("deepcompile")

#: The variables in which MPI launchers put what torch.distributed reads from RANK, WORLD_SIZE and LOCAL_RANK.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)

#: The group that :func:`make` made, to be destroyed at exit.
_own: dist.ProcessGroup | None = None


def resolve_or_make(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group, which is made where there is none."""
    if group is None and dist.is_available() and not dist.is_initialized():
        make()
    return channels.resolve_group(group)


def make(
    backend: str | None = None,
    *,
    timeout: datetime.timedelta = dist.default_pg_timeout,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    port: int = 29500,
    discover_mpi: bool = True,
) -> None:
    """Makes the default group. ``rank`` and ``world_size`` default to the launcher's environment, or to a world of one
    without a launcher.
    """
    global _own
    if discover_mpi and rank < 0:
        _discover_mpi()
    if rank < 0 and init_method is None and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        _log.info("no process group and no launcher's RANK in the environment: this process is a world of one")
        store = HashStore()
        dist.init_process_group(_backend(backend), store=store, rank=0, world_size=1, timeout=timeout)
    else:
        if init_method is None:
            os.environ.setdefault("MASTER_PORT", str(port))
        dist.init_process_group(
            _backend(backend), timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )
    _own = dist.group.WORLD


def destroy_own() -> None:
    """Called at exit. Does nothing if the program has destroyed or replaced the group that :func:`make` made."""
    global _own
    own, _own = _own, None
    if own is not None and dist.is_initialized() and dist.group.WORLD is own:
        dist.destroy_process_group()


def _backend(name: str | None) -> str:
    if name is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if name == "ccl" and name not in dist.Backend.backend_list:
        return "gloo"  # oneCCL is not installed; DeepSpeed's callers use "ccl" for the CPU
    return name


def _discover_mpi() -> None:
    for names in _LAUNCHERS:
        if "RANK" not in os.environ and all(name in os.environ for name in names[:2]):
            for ours, theirs in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), names, strict=True):
                if theirs in os.environ:
                    os.environ.setdefault(ours, os.environ[theirs])
