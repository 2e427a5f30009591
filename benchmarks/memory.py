"""The peak of memory of a training step under ZeRO-3, exactly: deepcompile, planned and not, against FSDP2.

A Llama trains on two ranks of one thread. A library that is loaded before libc counts every byte that a rank has allocated
(``heap_meter.c``). The collectives of all run over shared memory, whose staging is nobody's heap, as NCCL's is not. A row
for each way of training:

``peak``       the most bytes within a step
``predicted``  what the planner said that would be
``held``       shards and states of this rank, which are there all the time, and gradients where they are, too
``idle``       memory that the pool of gathered parameters keeps between steps
``step``       what a step needs beyond these
``gathered``   the most of gathered parameters at once (in ``idle`` where the pool keeps it, else in ``step``)
``blocks``     the largest blocks behind ``step``, in KiB: gradients, gathered parameters and activations differ in size

``--only NAME,...`` runs some of them, ``--explain`` prints ``engine.explain()`` of each.
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

from report import Report, parser_of
from rich.table import Table

RANKS = 2
MIB = 2**20

#: name -> what the configuration says; None: not ours
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "least": {"memory_budget": "least"},
    "unplanned": {"memory_budget": 1},  # too little for any plan
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
    # As on several hosts: ranks that share memory read parameters where the shards lie and need far less.
    os.environ["DEEPCOMPILE_READ_IN_PLACE"] = "off"
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import gc

    import torch
    import torch.distributed as dist
    from llama_model import Llama

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
    step_bytes = meter.peak() - compiled
    more = meter.blocks(now=False) - blocks
    # The process also holds what is no tensor: what it holds of tensors is known better than measured.
    # Gradients that are let go with the update come and go within the step.
    stay = engine is not None and not engine.sharding.frees_gradients
    found: dict[str, Any] = {
        "held": parameters * (4 if stay else 3) // RANKS,
        "idle": 0,
        "step": step_bytes,
    }
    found["blocks"] = [(size // 1024, count) for size, count in sorted(more.items(), reverse=True)[:4]]
    if engine is not None:
        stats = engine.stats()
        found["gathered"] = stats["gathered_bytes_peak"]
        found["idle"] = stats["buffer_bytes_idle"] + stats["bucket_bytes"]
        step = engine.sharding.planner.training_step()
        if step is not None and step.plan is not None:
            found["predicted"] = step.plan.micro.peak_bytes
        found["explained"] = str(engine.explain())
    found["peak"] = found["held"] + found["idle"] + found["step"]
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


def row(name: str, found: dict[str, Any]) -> list[str]:
    sizes = [found.get(key) for key in ("peak", "predicted", "held", "idle", "step", "gathered")]
    blocks = ", ".join(f"{count} x {size}" for size, count in found["blocks"])
    return [name, *("" if size is None else f"{size / MIB:.1f}" for size in sizes), blocks]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", help="names of the ways of training, with commas between them")
    parser.add_argument("--explain", action="store_true", help="print the plans")
    options = parser.parse_args()
    layers = 2 if options.quick else 8
    title = f"Memory of a step of Llama, {layers} layers, fp32, {RANKS} ranks, in MiB"
    report = Report(title)
    table = Table("", "peak", "predicted", "held", "idle", "step", "gathered", "blocks (KiB)", title=title)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        meter = f"{folder}/heap_meter.so"
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heap_meter.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", meter, source], check=True)
        os.environ["LD_PRELOAD"] = meter
        for name in options.only.split(",") if options.only else SYSTEMS:
            results[name] = run(name, SYSTEMS[name], layers, folder)
            table.add_row(*row(name, results[name]))
            print(*row(name, results[name]), sep=" | ", flush=True)
            if options.explain and SYSTEMS[name] is not None:
                print(results[name]["explained"], flush=True)
    for name, found in results.items():
        if SYSTEMS[name] is None:
            continue
        if "FSDP2 compiled" in results:
            peer = results["FSDP2 compiled"]["peak"]
            ratio_bar = 1.0 if name in ("least", "unplanned") else None
            report.add(name, found["peak"] / MIB, "MiB", "FSDP2 compiled", peer / MIB, ratio_bar=ratio_bar)
        if "predicted" in found:
            report.add(name, found["peak"] / MIB, "MiB", "predicted", found["predicted"] / MIB)
            apart = 100 * abs(found["peak"] / found["predicted"] - 1)
            report.add(f"{name}, peak and prediction apart", apart, "%", bar=5.0 if name == "least" else None)
    return report.finish(options, [table])


if __name__ == "__main__":
    sys.exit(main())
