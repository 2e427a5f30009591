"""Groups of the backend ``shm`` beside the gloo group of the harness, and tensors of every kind."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

import deepcompile as deepcompile  # registers the backend


def shm_group(seconds: float = 30, ranks: list[int] | None = None) -> dist.ProcessGroup:
    return dist.new_group(ranks, backend="shm", timeout=datetime.timedelta(seconds=seconds))


def become_shm(rank: int, world: int, store_path: str, seconds: float = 30) -> None:
    """Makes the default group one of ``shm``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(store_path, world)
    dist.init_process_group(
        "shm", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds)
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


#: Types that the engine reduces, and those that it only moves.
REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]


def values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Small whole numbers, so that sums over a few ranks are exact in every type."""
    numbers = torch.randint(0, 5, shape, generator=generator)
    if dtype == torch.bool:
        return numbers > 2
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + 1).double()).to(dtype)
    return numbers.to(dtype)


def laid_out(tensor: torch.Tensor, layout: int) -> torch.Tensor:
    """The same values over other strides. Ranks choose differently on purpose."""
    if layout == 1 and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2:
        wide = torch.zeros([*tensor.shape[:-1], 2 * tensor.shape[-1] + 1], dtype=torch.uint8).to(tensor.dtype)
        view = wide[..., 1::2]
        view.copy_(tensor)
        return view
    if layout == 3:
        shared = deepcompile.shm.empty(tensor.shape, dtype=tensor.dtype)
        shared.copy_(tensor)
        return shared
    return tensor.clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same_everywhere(tensor: torch.Tensor) -> bool:
    """Whether all ranks of the gloo group hold the same bits."""
    own = bits(tensor)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    return all(torch.equal(own, other) for other in others)


def error_of(call, *arguments, **keywords) -> str:
    """What the call raises; it must be a RuntimeError."""
    try:
        result = call(*arguments, **keywords)
        if result is not None:
            result.wait()
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")
