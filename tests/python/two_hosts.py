"""One rank of a job on two hosts, each a network namespace. usage: two_hosts.py RANK WORLD"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist

import deepcompile


def main(rank: int, world: int) -> None:
    deepcompile.init_distributed(rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    # Shared memory is not taken for granted, and the sum is right all the same.
    assert not deepcompile.comm.uses_shared_memory()
    tensor = torch.full((4, 6), rank + 1.0).t()
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    assert torch.equal(tensor, torch.full((6, 4), world * (world + 1) / 2))
    assert torch.ops.deepspeed.inference_all_reduce(torch.ones(3))[0] == world
    try:
        dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=30))
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
    else:
        raise AssertionError("a group of shm across hosts")
    # The ranks of one host may still have one.
    half = [dist.new_group(ranks, backend="shm") for ranks in ([0, 1], [2])][rank // 2]
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=half)
    assert tensor[0] == (2 if rank < 2 else 1)
    dist.barrier()

    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    os.environ["LOCAL_SIZE"] = str(world)  # not the truth
    try:
        deepcompile.dc.initialize(world, rank)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
    else:
        raise AssertionError("LOCAL_SIZE was believed")


main(int(sys.argv[1]), int(sys.argv[2]))
