"""Registers the backend ``shm`` with torch.distributed: ``init_process_group("shm")`` after ``import deepcompile``."""

from __future__ import annotations

import atexit
import datetime
from typing import Any

import torch.distributed as dist

from deepcompile.runtime.load import _C


def _make(options: Any, _pg_options: Any) -> Any:
    return _C.make_shm_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )


def register() -> None:
    """Does nothing if this PyTorch has no torch.distributed, or if the backend is registered already."""
    if not dist.is_available() or "shm" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu"])
    # Operations that the program has not waited for get five seconds to complete.
    atexit.register(_C.close_shm_backends, datetime.timedelta(seconds=5))


register()
