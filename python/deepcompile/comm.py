"""Communication as DeepSpeed's users know it: :func:`init_distributed`, :func:`inference_all_reduce`, and the collectives of
torch.distributed under their own names.
"""

from __future__ import annotations

import datetime
import logging
import os
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    get_global_rank,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from deepcompile.runtime import inference, process_group
from deepcompile.runtime.after_import import after_import
from deepcompile.runtime.load import _C

_log = logging.getLogger("deepcompile")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta = dist.default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises torch.distributed unless the program has, and :func:`inference_all_reduce`. Every rank calls it.

    ``rank`` and ``world_size`` default to the launcher's environment, or to a world of one without a launcher;
    ``dist_backend`` defaults to gloo, with NCCL for CUDA tensors if there are GPUs. ``config`` is ignored; DeepSpeed's
    callers pass it.
    """
    if not dist.is_initialized():
        if dist_init_required is False:
            raise RuntimeError("init_distributed(dist_init_required=False): there is no process group yet")
        process_group.make(
            dist_backend,
            timeout=timeout,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            port=distributed_port,
            discover_mpi=auto_mpi_discovery,
        )
    if not inference.connected():
        inference.connect(dist.get_world_size(), dist.get_rank(), timeout)
    if verbose and dist.get_rank() == 0 and (apart := _C.inference_ranks_apart()) is not None:
        _log.info("inference_all_reduce goes through the process group: %s", apart)


#: Native (src/bindings/inference_call.cpp), because summing a short tensor takes less time than a call through torch.ops.
inference_all_reduce = _C.inference_all_reduce


def _by_operator(tensor: torch.Tensor, op: Any = None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The fallback of inference_all_reduce's native code: runs the operator, or, if the operator does not support the
    group, the reduction or the device, torch.distributed's all_reduce.
    """
    default_group = group is None or group is dist.group.WORLD
    if not default_group or (op is not None and op != ReduceOp.SUM) or not tensor.is_cpu:
        all_reduce(tensor, ReduceOp.SUM if op is None else op, group)
        return tensor
    if not inference.connected() and dist.is_initialized():
        inference.connect(dist.get_world_size(), dist.get_rank(), dist.default_pg_timeout)
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    return tensor


def _traced(tensor: torch.Tensor, op: Any = None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What torch.compile traces in place of inference_all_reduce, which is native."""
    if group is not None or (op is not None and op != ReduceOp.SUM) or not tensor.is_cpu:
        all_reduce(tensor, ReduceOp.SUM if op is None else op, group)
        return tensor
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    return tensor


def _teach_dynamo(_: ModuleType) -> None:
    torch.compiler.substitute_in_graph(inference_all_reduce)(_traced)


inference.serve_otherwise(_by_operator)
after_import("torch._dynamo", _teach_dynamo)


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed's ``monitored_barrier``, extended to groups of the backend ``shm``, which torch.distributed's
    own refuses.
    """
    if dist.get_backend(group) != "shm":
        dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    limit = timeout if timeout is not None else dist.default_pg_timeout
    chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]


def uses_shared_memory() -> bool:
    """Whether :func:`inference_all_reduce` goes through shared memory, and not through the process group."""
    return inference.connected() and _C.inference_ranks_apart() is None


def get_local_rank() -> int:
    """The launcher's LOCAL_RANK; 0 if it is not set."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if group is None or group is dist.group.WORLD:
        inference.close()
    dist.destroy_process_group(group)


__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "uses_shared_memory",
]
