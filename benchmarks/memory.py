"""The peak of memory of a training step under ZeRO-3, exactly: deepcompile, planned and not, against FSDP2.

A Llama trains on two ranks of one thread. A library that is loaded before libc counts every byte that a rank has allocated
(``heap_meter.c``); what lies in memory that the ranks share (shards and buckets) is added by its size. The collectives of
all run over shared memory, whose staging is nobody's heap, as NCCL's is not. One row for each way of training:

``held``      between two steps: shards, gradients, states (nothing that a step makes)
``peak``      the most within a step
``gathered``  the most of gathered parameters at once
``predicted`` what the planner said the peak would be
``rest``      of the peak, beside ``held`` and ``gathered``: activations, gradients on their way, temporaries
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

from report import Report, arguments
from rich.table import Table

RANKS = 2
MIB = 2**20

#: name -> what the configuration says; None: not ours
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "unplanned": {"memory_budget": 1},
    "least": {"memory_budget": "least"},
    "on_demand": {"compile": {"strategy": "on_demand"}},
    "per_block": {"compile": {"strategy": "per_block"}},
    "free memory": {},
    "FSDP2 compiled": None,
}


class Meter:
    """The counters of ``heap_meter.c`` in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("heap_live", "heap_peak"):
            getattr(self._library, name).restype = ctypes.c_int64

    def live(self) -> int:
        return int(self._library.heap_live())

    def peak(self) -> int:
        return int(self._library.heap_peak())

    def reset(self) -> None:
        self._library.heap_reset_peak()

    def blocks(self, now: bool) -> Counter[int]:
        """The large blocks at the peak, or now: how many of each size."""
        sizes = (ctypes.c_int64 * 8192)()
        count = self._library.heap_blocks(int(now), sizes, len(sizes))
        return Counter(sizes[:count])


def build(name: str, config: dict[str, Any] | None, model: Any) -> tuple[Any, Any]:
    """A function that trains one step on a batch, and the engine where it is ours."""
    import torch

    if config is not None:
        import deepcompile

        zero = {"zero_optimization": {"stage": 3}, "timeout": 200}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = deepcompile.initialize(model, optimizer, zero | config)

        def train(batch: torch.Tensor) -> None:
            engine.backward(engine(batch))
            engine.step()

        return train, engine
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, None


def measure(name: str, config: dict[str, Any] | None, layers: int, rank: int, folder: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import gc

    import torch
    import torch.distributed as dist
    from llama import Llama

    import deepcompile as deepcompile  # registers the backend shm

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{''.join(c for c in name if c.isalnum())}", RANKS)
    dist.init_process_group("shm", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Llama(layers, size=256, heads=4, vocabulary=4096, length=64)
    parameters = sum(4 * p.numel() for p in model.parameters())
    batch = torch.randint(0, 4096, (1, 65), generator=torch.Generator().manual_seed(rank))
    meter = Meter()
    gc.collect()
    train, engine = build(name, config, model)
    for _ in range(6):  # plans are made from measurements in these
        train(batch)
    gc.collect()
    compiled = meter.live()
    meter.reset()
    blocks = meter.blocks(now=True)
    if engine is not None:
        engine.sharding.runtime.reset_gathered_peak()
    train(batch)
    found: dict[str, Any] = {"step": meter.peak() - compiled}
    more = meter.blocks(now=False) - blocks
    found["more"] = {size // 1024: n for size, n in sorted(more.items(), reverse=True) if n > 0}
    found["held"] = parameters * 3 // RANKS  # shards and states; the process also holds what is no tensor
    found["gathered"] = found["predicted"] = 0
    if engine is not None:
        stats = engine.stats()
        found["gathered"] = stats["gathered_bytes_peak"]
        found["idle"] = stats["buffer_bytes_idle"]
        found["buckets"] = stats["bucket_bytes"]
        found["held"] += parameters // RANKS + found["idle"] + found["buckets"]
        step = engine.sharding.planner.training_step()
        if step is not None and step.plan is not None:
            found["predicted"] = step.plan.micro.peak_bytes
            found["kept"] = sum(take.keep for take in step.plan.graphs["forward"].takes)
        else:
            found["why"] = step.why_not if step is not None else "no step"
        found["explained"] = str(engine.explain())
    found["peak"] = found["held"] + found["step"]
    pipe.send(found)
    dist.destroy_process_group()


def run(name: str, config: dict[str, Any] | None, layers: int, folder: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(name, config, layers, rank, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            if not pipe.poll(400):
                raise RuntimeError(f"{name} did not answer within 400 s")
        return max((pipe.recv() for pipe in pipes), key=lambda found: int(found["peak"]))
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def main() -> int:
    options = arguments(__doc__)
    layers = 2 if options.quick else 8
    report = Report(f"peak memory of a step of Llama, {layers} layers, fp32, {RANKS} ranks")
    wanted = os.environ.get("ONLY", "").split(",") if os.environ.get("ONLY") else list(SYSTEMS)
    with tempfile.TemporaryDirectory() as folder:
        meter = f"{folder}/heap_meter.so"
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heap_meter.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", meter, source], check=True)
        os.environ["LD_PRELOAD"] = meter
        for name in wanted:
            config = SYSTEMS[name]
            found = run(name, config, layers, folder)
            print(
                name,
                {
                    k: round(v / MIB, 2) if isinstance(v, int) and k != "kept" else v
                    for k, v in found.items()
                    if k != "explained"
                },
                flush=True,
            )
            if os.environ.get("SHOW"):
                print(found.get("explained"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
