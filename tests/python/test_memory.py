"""What a rank holds under ZeRO-3, measured: its part of parameters, gradients and states, and the plan's buffers."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepcompile
from deepcompile.sharding.shard_parameter import ShardParameter
from harness import only_on_cpu, run_ranks
from models import seeded

pytestmark = only_on_cpu("measures the memory of the process")

WIDTH = 2048
#: Parameters, gradients and the two states of AdamW.
COPIES = 4


class Stack(nn.Module):
    """Nearly all of its memory is parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def process_bytes() -> int:
    """Memory of this process that came to be after its start; of pages that ranks share its part. Every rank calls it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocators keep is not held by anybody
    deepcompile.shm.trim()
    dist.barrier()
    with open("/proc/self/smaps_rollup") as file:
        kib = {line.split()[0]: int(line.split()[1]) for line in file if line[0].isupper()}
    dist.barrier()
    return 1024 * (kib["Anonymous:"] + kib["Pss_Shmem:"])


def live_tensor_bytes() -> int:
    """Of all memory that a tensor known to Python holds, each piece once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter, ShardParameter) and not thing.is_meta:
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


def engine_of(width: int, layers: int, compiles: object) -> deepcompile.Engine:
    with deepcompile.init_sharded():
        model = Stack(width, layers)
    config = {"zero_optimization": {"stage": 3}, "timeout": 60, "compile": compiles}
    return deepcompile.initialize(model, lambda params: torch.optim.AdamW(params, lr=1e-4), config)


def train(engine: deepcompile.Engine, width: int) -> None:
    for step in range(5):
        engine.backward(engine(torch.randn(2, width, generator=seeded(step))))
        engine.step()


def held(rank: int, world: int, layers: int, compiles: object) -> dict[str, float]:
    small = engine_of(16, 2, compiles)  # brings what a process that trains loads once
    train(small, 16)
    small.close()
    del small
    tensors_before, process_before = live_tensor_bytes(), process_bytes()
    engine = engine_of(WIDTH, layers, compiles)
    train(engine, WIDTH)
    engine.backward(engine(torch.ones(2, WIDTH)))  # the gradients are there
    stats = engine.stats()
    buffers = stats["gathered_bytes_live"] + stats["buffer_bytes_idle"] + stats["bucket_bytes"]
    process = torch.tensor(process_bytes() - process_before, dtype=torch.float64)
    dist.all_reduce(process)  # whose the shared pages are is for the kernel to say: on average they are everybody's
    return {
        "whole": COPIES * 4 * sum(sharded.numel for sharded in engine.sharding.params),
        "tensors": live_tensor_bytes() - tensors_before,
        "process": process.item() / world,
        "buffers": buffers,
        "largest": 4 * max(sharded.numel for sharded in engine.sharding.params),
    }


PLANNED = {"backend": "aot_eager", "strategy": "per_block"}


# So many layers that what a process holds besides (a traced graph, a gradient on its way) is small beside the part.
@pytest.mark.parametrize(
    ("world", "layers", "compiles"), [(2, 12, False), (4, 24, False), (2, 24, PLANNED)], ids=["2", "4", "2-planned"]
)
def test_a_rank_holds_its_part_of_parameters_gradients_and_states_and_the_plans_buffers(
    world: int, layers: int, compiles: object
) -> None:
    for found in run_ranks(world, held, layers, compiles):
        part = found["whole"] / world
        assert 0.99 * part <= found["tensors"] <= 1.05 * part, found
        assert found["process"] <= 1.05 * (part + found["buffers"]), found
        assert found["buffers"] <= 6.1 * found["largest"], found  # two buckets of two layers, two layers gathered
