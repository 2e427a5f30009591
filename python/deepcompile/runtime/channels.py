"""Communication channels of a runtime, opened beside the user's process group without touching it.

Gathers and reductions each get a channel of their own, connected through the group's store under a prefix. (``new_group``
would hang if the group is not the whole world.) If the group's backend cannot be opened that way, the group itself is the
one channel for everything.
"""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from deepcompile.runtime.cuda_parts import require_cuda
from deepcompile.runtime.load import _C

_log = logging.getLogger("deepcompile")

#: How often channels were opened on a group, by its name. Part of the prefix, so that a second runtime on the same group
#: uses new keys. The same on all ranks, because opening is a collective.
_generations: Counter[str] = Counter()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("no process group: call torch.distributed.init_process_group first, or pass one")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    return group


#: Slot size of the control channel: agreements are a few hundred bytes.
_CONTROL_SLOT_BYTES = 16384

Channel = Backend | _C.ShmGroup | _C.Channel


class Channels(NamedTuple):
    """The channels for gathers, reductions and agreements; all the same object if the group's own backend serves all."""

    gather: Channel
    reduce: Channel
    control: Channel
    #: A store of this runtime alone, for other messages between its ranks.
    store: Store


def default_device(group: dist.ProcessGroup) -> torch.device:
    """The device of parameters if the caller does not give one: the current GPU if it is PyTorch's default device or the
    group has NCCL, else the CPU. (Gloo alone does not mean CUDA, although it can transfer CUDA tensors.)
    """
    by_default = torch.get_default_device().type == "cuda"
    if by_default or (torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def open_channels(group: dist.ProcessGroup, device: torch.device, config: _C.Config) -> Channels:
    """Opens the channels. CPU: shared memory if a handshake proves that the ranks share a host, else gloo. CUDA: NCCL or
    symmetric memory for gathers and reductions, and a host channel for agreements.
    """
    name = group.group_name
    generation = _generations[name]
    _generations[name] += 1

    def store(purpose: str) -> Store:
        return PrefixStore(f"deepcompile/{name}/{generation}/{purpose}", group.get_group_store())

    limit = datetime.timedelta(seconds=config.timeout)
    on_host = _open_on_host(store, group, limit, agreements_alone=device.type != "cpu")
    if device.type == "cpu" or group.size() == 1:
        return Channels(*on_host, store("other"))
    if _C.communicator_choice() == "c10d":
        if config.registered_memory or config.symmetric_memory:
            raise ValueError(
                "DEEPCOMPILE_COMMUNICATOR=c10d leaves memory to the process group: set neither registered_memory nor "
                "symmetric_memory with it"
            )
        own = group._get_backend(device)
        return Channels(own, own, on_host[2], store("other"))
    cuda = require_cuda()

    def open_one(purpose: str) -> _C.Channel:
        channel: _C.Channel = cuda.nccl_channel(
            store(f"nccl/{purpose}"),
            group.rank(),
            group.size(),
            device.index,
            timeout=config.timeout,
            registered=config.registered_memory and purpose == "gather",
        )
        return channel

    if config.symmetric_memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some versions warn that the call is no longer needed
            enable_symm_mem_for_group(name)

        def open_symmetric(purpose: str) -> _C.Channel:
            channel: _C.Channel = cuda.symmetric_channel(
                store(f"symmetric/{purpose}"),
                name,
                group.rank(),
                group.size(),
                device.index,
                timeout=config.timeout,
                reduces=purpose == "reduce",
            )
            return channel

        return Channels(open_symmetric("gather"), open_symmetric("reduce"), on_host[2], store("other"))
    return Channels(open_one("gather"), open_one("reduce"), on_host[2], store("other"))


def _open_on_host(
    store: Callable[[str], Store], group: dist.ProcessGroup, limit: datetime.timedelta, agreements_alone: bool
) -> tuple[Channel, Channel, Channel]:
    """Opens host channels. ``agreements_alone``: only agreements use them, so one channel is enough."""
    own = group._get_backend(torch.device("cpu")) if _has_cpu_backend(group) else None
    ours = own is None or isinstance(own, dist.ProcessGroupGloo) or own.name() == "shm"
    if own is not None and not ours:
        return own, own, own
    if _C.communicator_choice() == "auto":
        shared = _open_shared(store, group, limit, agreements_alone)
        if shared is not None:
            return shared
    if own is not None and not isinstance(own, dist.ProcessGroupGloo):
        return own, own, own

    def open_one(purpose: str) -> Backend:
        return dist.ProcessGroupGloo(store(purpose), group.rank(), group.size(), timeout=limit)

    control = open_one("control")
    return (control, control, control) if agreements_alone else (open_one("gather"), open_one("reduce"), control)


def _has_cpu_backend(group: dist.ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in group._device_types)


def _open_shared(
    store: Callable[[str], Store], group: dist.ProcessGroup, limit: datetime.timedelta, agreements_alone: bool
) -> tuple[Channel, Channel, Channel] | None:
    """Shared-memory channels. None, on all ranks alike, if the ranks cannot share memory; rank 0 logs why."""

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

    opened: list[_C.ShmGroup] = []
    for purpose in ("control",) if agreements_alone else ("gather", "reduce", "control"):
        one = open_one(
            purpose,
            slot_bytes=_CONTROL_SLOT_BYTES if purpose == "control" else None,
            like=opened[0] if opened else None,
        )
        if isinstance(one, str):
            if group.rank() == 0:
                _log.warning("the runtime communicates through the process group: %s", one)
            return None
        opened.append(one)
    return (opened[0], opened[0], opened[0]) if agreements_alone else (opened[0], opened[1], opened[2])


def ranks_on_this_host(group: dist.ProcessGroup) -> int:
    """How many ranks share this host's cores: the launcher's LOCAL_WORLD_SIZE, which needs no collective."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 0:
        return min(int(local), group.size())
    return group.size()
