"""Tensors in memory that the ranks of one host share. Collectives of the backend ``shm`` read and write them directly,
without staging. Otherwise they are ordinary CPU tensors, freed with the last reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepcompile.runtime.load import _C


def _sizes(size: tuple[int | Sequence[int], ...]) -> list[int]:
    if len(size) == 1 and not isinstance(size[0], int):
        return list(size[0])
    return [int(n) for n in size]  # type: ignore[arg-type]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised, like :func:`torch.empty`. Raises an error if the system has not enough shared memory."""
    return _C.empty_shared(_sizes(size), dtype or torch.get_default_dtype())


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    return empty(*size, dtype=dtype).zero_()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in this process's shared memory. (``tensor.is_shared()`` is about PyTorch's own.)"""
    return _C.is_shared(tensor)


def trim() -> None:
    """Returns the shared memory of freed tensors to the system. Without this call it is kept for later tensors."""
    _C.trim_shared()


__all__ = ["empty", "is_shared", "trim", "zeros"]
