"""Small ZeRO-3 parameters for tests of single operators."""

from __future__ import annotations

import torch

from deepcompile import dc

GRAPH = 0


def shard_of(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = -(-whole.numel() // world)
    padded = torch.zeros(size * world, dtype=whole.dtype)
    padded[: whole.numel()] = whole.reshape(-1)
    return padded[rank * size : (rank + 1) * size].clone()


def whole_parameter(index: int, shape: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) * 0.25 + index).to(dtype)


def start(
    rank: int,
    world: int,
    count: int = 3,
    config: dict | None = None,
    shape: tuple[int, ...] = (5, 3),
    bucket_size: int = 1000,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A runtime with ``count`` parameters, ids from 0, in one graph. Returns shards and gradient buffers."""
    dc.init(None, {"timeout": 20, **(config or {})}, bucket_size)
    shards, buffers = [], []
    for index in range(count):
        shard = shard_of(whole_parameter(index, shape, dtype), rank, world).requires_grad_(requires_grad)
        buffer = torch.zeros(shard.numel(), dtype=dtype)
        dc.register_z3_param(index, shape, shard, buffer, name=f"w{index}")
        shards.append(shard)
        buffers.append(buffer)
    dc.register_graph_z3(GRAPH, list(range(count)))
    return shards, buffers


def gather(shard: torch.Tensor, index: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    gathered = torch.ops.dc.allgather_param(shard, GRAPH, index, dtype)
    return torch.ops.dc.wait_allgather(gathered, GRAPH, index)


def release(index: int, n_users: int = 1) -> None:
    torch.ops.dc.release_param(torch.empty(0), GRAPH, index, n_users)
