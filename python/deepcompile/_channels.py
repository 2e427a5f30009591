"""Communication channels of a runtime, opened beside the user's process group without touching it.

Gathers and reductions each get a channel of their own, connected through the group's store under a prefix: ``new_group``
would hang where the group is not the whole world. Backends that cannot be opened that way serve all, in one order.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from deepcompile._load import _C

_log = logging.getLogger("deepcompile")

#: How often channels were opened on a group, by its name: part of the prefix, so that a second runtime on the same group
#: meets fresh keys. The same on all ranks, because opening is a collective.
_generations: Counter[str] = Counter()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("no process group: call torch.distributed.init_process_group first, or pass one")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    return group


#: Agreements are a few hundred bytes.
_CONTROL_SLOT_BYTES = 16384

Channel = Backend | _C.ShmGroup


def open_channels(group: dist.ProcessGroup, timeout: float) -> tuple[Channel, Channel, Channel]:
    """What carries gathers, reductions and agreements; the same object where the group's own backend must serve all.

    On CPU that is memory which the ranks share, where they prove to share a host.
    """
    name = group.group_name
    generation = _generations[name]
    _generations[name] += 1
    own = group._get_backend(torch.device("cpu"))
    if not isinstance(own, dist.ProcessGroupGloo) and own.name() != "shm":
        return own, own, own
    limit = datetime.timedelta(seconds=timeout)

    def store(purpose: str) -> Store:
        return PrefixStore(f"deepcompile/{name}/{generation}/{purpose}", group.get_group_store())

    if _C.communicator_choice() == "auto":
        shared = _open_shared(store, group, limit)
        if shared is not None:
            return shared
    if not isinstance(own, dist.ProcessGroupGloo):
        return own, own, own

    def open_one(purpose: str) -> Backend:
        return dist.ProcessGroupGloo(store(purpose), group.rank(), group.size(), timeout=limit)

    return open_one("gather"), open_one("reduce"), open_one("control")


def _open_shared(
    store: Callable[[str], Store], group: dist.ProcessGroup, limit: datetime.timedelta
) -> tuple[Channel, Channel, Channel] | None:
    """None where the ranks do not share a host, or cannot share memory, on all of them alike; rank 0 says why."""

    def open_one(purpose: str, slot_bytes: int | None = None, like: _C.ShmGroup | None = None) -> _C.ShmGroup | str:
        return _C.open_shm_group(
            store(f"shm/{purpose}"),
            group.rank(),
            group.size(),
            limit,
            f"{group.group_name}/{purpose}",
            slot_bytes=slot_bytes,
            like=like,
        )

    def no_memory(reason: str) -> None:
        if group.rank() == 0:
            _log.warning("the runtime communicates through the process group: %s", reason)

    gather = open_one("gather")
    if isinstance(gather, str):
        return no_memory(gather)
    reduce = open_one("reduce", like=gather)
    if isinstance(reduce, str):
        return no_memory(reduce)
    control = open_one("control", slot_bytes=_CONTROL_SLOT_BYTES, like=gather)
    if isinstance(control, str):
        return no_memory(control)
    return gather, reduce, control


def ranks_on_this_host(group: dist.ProcessGroup) -> int:
    """How many ranks share this host's cores; asked of the launcher, which knows without a collective."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 0:
        return min(int(local), group.size())
    return group.size()


__all__ = ["open_channels", "ranks_on_this_host", "resolve_group"]
