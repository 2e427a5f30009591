"""The runtime: register sharded parameters and graphs, then call the operators ``torch.ops.dc.*``.

The functions of this module act on the default runtime, which :func:`init` makes and :func:`cleanup` destroys. A process
that needs a second one, on another process group, makes it with :class:`Runtime`, whose methods are the same functions.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepcompile.runtime import inference, process_group
from deepcompile.runtime.load import _C
from deepcompile.runtime.runtime import DEFAULT_BUCKET_SIZE, Runtime, open_runtimes

_default: Runtime | None = None


def init(
    process_group: dist.ProcessGroup | None = None,
    config: Mapping[str, Any] | object | None = None,
    initial_reduce_bucket_size: int = DEFAULT_BUCKET_SIZE,
    device: torch.device | str | None = None,
) -> Runtime:
    """Makes the default runtime, on ``process_group`` or the default group. Every rank of the group calls it."""
    global _default
    if _default is not None:
        raise RuntimeError(
            "dc.init: the default runtime exists already; call dc.cleanup() first, or make a second runtime on another "
            "process group with dc.Runtime(process_group, config, initial_reduce_bucket_size)"
        )
    runtime = Runtime(process_group, config, initial_reduce_bucket_size, device)
    _C.set_default_runtime(runtime)
    _default = runtime
    return runtime


def cleanup() -> None:
    """Destroys the default runtime; does nothing when there is none. ``init`` may be called again afterwards."""
    global _default
    runtime, _default = _default, None
    _C.set_default_runtime(None)
    if runtime is not None:
        runtime.cleanup()


def _runtime() -> Runtime:
    if _default is None:
        raise RuntimeError("no runtime: call dc.init(process_group, config, initial_reduce_bucket_size) first")
    return _default


def register_param(
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor | None,
    offset: int,
    *,
    name: str = "",
    reduce_dtype: torch.dtype | None = None,
) -> None:
    _runtime().register_param(ds_id, ds_shape, ds_tensor, grad_buffer, offset, name=name, reduce_dtype=reduce_dtype)


def register_z3_param(
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor | None,
    persistent: bool = False,
    *,
    name: str = "",
    reduce_dtype: torch.dtype | None = None,
) -> None:
    _runtime().register_z3_param(
        ds_id, ds_shape, ds_tensor, grad_buffer, persistent, name=name, reduce_dtype=reduce_dtype
    )


def register_graph_z1(graph_id: int, ds_ids: Sequence[int]) -> None:
    _runtime().register_graph_z1(graph_id, ds_ids)


def register_graph_z2(graph_id: int, ds_ids: Sequence[int]) -> None:
    _runtime().register_graph_z2(graph_id, ds_ids)


def register_graph_z3(graph_id: int, ds_ids: Sequence[int]) -> None:
    _runtime().register_graph_z3(graph_id, ds_ids)


def set_persistent(ds_id: int) -> None:
    _runtime().set_persistent(ds_id)


def start_forward() -> None:
    _runtime().start_forward()


def end_forward() -> None:
    _runtime().end_forward()


def start_backward(update: bool, *, settle_later: bool = False) -> None:
    _runtime().start_backward(update, settle_later=settle_later)


def settle() -> None:
    _runtime().settle()


def enable_profiling(enable: bool) -> None:
    _runtime().enable_profiling(enable)


def is_profiling() -> bool:
    return _runtime().is_profiling()


def reset() -> None:
    _runtime().reset()


def invalidate_gathered_param(ds_id: int) -> None:
    _runtime().invalidate_gathered_param(ds_id)


def clear_all_gathered_params() -> None:
    _runtime().clear_all_gathered_params()


def stats() -> dict[str, Any]:
    return _runtime().stats()


def initialize(size: int, rank: int) -> None:
    """Sets up ``torch.ops.deepspeed.inference_all_reduce`` over ``size`` ranks. A collective: every rank calls it, once.

    The ranks meet through the process group if there is one, else through a store at ``MASTER_ADDR`` and ``MASTER_PORT``,
    for the ``LOCAL_SIZE`` ranks of one host. A handshake proves that the ranks share a host; if they do not, the process
    group does the all-reduce.
    """
    inference.initialize(size, rank)


@atexit.register
def _cleanup_all() -> None:
    """Closes runtimes at exit, before the interpreter destroys the process groups that they use."""
    cleanup()
    for runtime in list(open_runtimes):
        runtime.cleanup()
    inference.close()
    process_group.destroy_own()
