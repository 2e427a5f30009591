"""Communication channels of a runtime, opened beside the user's process group without touching it.

Gathers and reductions each get a backend of their own, connected through the group's store under a prefix: ``new_group``
would hang where the group is not the whole world. Backends that cannot be opened that way serve all, in one order.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore

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


def open_channels(group: dist.ProcessGroup, timeout: float) -> tuple[Backend, Backend, Backend]:
    """The backends for gathers, reductions and agreements; the same object where the group's own must serve all."""
    name = group.group_name
    generation = _generations[name]
    _generations[name] += 1
    own = group._get_backend(torch.device("cpu"))
    if not isinstance(own, dist.ProcessGroupGloo):
        return own, own, own
    limit = datetime.timedelta(seconds=timeout)

    def open_one(purpose: str) -> Backend:
        store = PrefixStore(f"deepcompile/{name}/{generation}/{purpose}", group.get_group_store())
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=limit)

    return open_one("gather"), open_one("reduce"), open_one("control")


def ranks_on_this_host(group: dist.ProcessGroup) -> int:
    """How many ranks share this host's cores; asked of the launcher, which knows without a collective."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 0:
        return min(int(local), group.size())
    return group.size()


__all__ = ["open_channels", "ranks_on_this_host", "resolve_group"]
