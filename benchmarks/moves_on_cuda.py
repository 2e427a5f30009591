"""How fast parameters and gradients move on one GPU: gathers and reductions of two ranks through symmetric memory and NCCL,
offload and reload of one, alone and beside compute.

The bound of a gather between ranks that share a GPU is its memory: a plain copy of as many bytes by both ranks at once. (A
reduction stages half of the gradient, reads as much twice and writes half: five quarters of a copy.) The bound of an offload
is PCIe: a plain copy between pinned and device memory. Two ranks need what docs/cuda.md says.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
from typing import Any

from report import Report, arguments

GATHERED_MIB = (64, 256, 1024)
MOVED_MIB = (16, 64, 256)
#: Products of matrices of 8192 rows and columns, beside which the largest of them is moved: about as long.
PRODUCTS = 3
ROUNDS = 30
#: Within a step of the engine, where nobody changes a shard, the ranks need not meet before every gather.
KNOWN = "symmetric memory, known step"
REGISTERED = "NCCL, registered memory"
HOW = (KNOWN, "symmetric memory", REGISTERED, "NCCL")
REDUCED_MIB = (1, 16, 64, 256)
#: Ways of reductions, and what asks for them.
REDUCED = {"symmetric memory": "always", "NCCL": "never", "as measured": "auto"}


def seconds_of(function: Any, rounds: int = ROUNDS) -> float:
    """Of one call, on the device, when many follow each other."""
    import torch

    for _ in range(3):
        function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(rounds):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds * 1e-3


def gathers(rank: int, world: int, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from deepcompile import dc

    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/gathers", world)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    found: dict[str, float] = {}
    for how in HOW:
        memory = {"symmetric_memory": "symmetric" in how, "registered_memory": how == REGISTERED}
        runtime = dc.Runtime(None, {"timeout": 60, **memory}, device="cuda")
        sizes = {mib: mib * 2**20 // 2 for mib in GATHERED_MIB}  # elements of bf16
        shards = {}
        for index, (mib, elements) in enumerate(sizes.items()):
            shards[mib] = runtime.empty((elements // world,), torch.bfloat16).fill_(rank + 1)
            runtime.register_z3_param(index, [elements], shards[mib], None)
        runtime.register_graph_z3(1, list(range(len(sizes))))
        for index, mib in enumerate(sizes):

            def gather(shard: Any = shards[mib], index: int = index) -> None:
                whole = torch.ops.dc.wait_allgather(torch.ops.dc.allgather_param(shard, 1, index), 1, index)
                torch.ops.dc.release_param(whole, 1, index, 1)

            dist.barrier()
            runtime.start_forward()
            runtime.hold_shards(how == KNOWN)
            found[f"{how} {mib}"] = mib * 2**20 / seconds_of(gather)
        runtime.cleanup()
    for mib in GATHERED_MIB:
        source = torch.ones(mib * 2**19, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        dist.barrier()
        found[f"copy {mib}"] = mib * 2**20 / seconds_of(lambda source=source, target=target: target.copy_(source))
    pipe.send(found)
    dist.destroy_process_group()


def reductions(rank: int, world: int, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from deepcompile import dc

    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/reductions", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
    found: dict[str, float] = {}
    for how, choice in REDUCED.items():
        os.environ["DEEPCOMPILE_SYMMETRIC_REDUCTIONS"] = choice
        runtime = dc.Runtime(None, {"timeout": 60, "symmetric_memory": True}, 1 << 10, device="cuda")
        shards = {}
        for index, mib in enumerate(REDUCED_MIB):
            elements = mib * 2**19  # of bf16
            shards[mib] = runtime.empty((elements // world,), torch.bfloat16).zero_()
            runtime.register_z3_param(index, [elements], shards[mib], torch.zeros_like(shards[mib]))
            runtime.register_graph_z3(1 + index, [index])
        for index, mib in enumerate(REDUCED_MIB):
            gradient = torch.full((2 * shards[mib].numel(),), float(rank), dtype=torch.bfloat16, device="cuda")

            def reduce(
                runtime: Any = runtime, gradient: Any = gradient, shard: Any = shards[mib], graph: int = 1 + index
            ) -> None:
                runtime.start_backward(True)
                torch.ops.dc.reduce_shard(gradient, shard, graph, True)
                torch.ops.dc.end_backward(graph)

            dist.barrier()
            found[f"{how} {mib}"] = mib * 2**20 / seconds_of(reduce)
        runtime.cleanup()
    pipe.send(found)
    dist.destroy_process_group()


def moves(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from deepcompile import dc

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dc.init(None, {"timeout": 60}, 1000, "cuda")
    dc.register_z3_param(0, [4], torch.zeros(4, device="cuda"), None)
    dc.register_graph_z3(0, [0])
    found: dict[str, float] = {}
    ops = torch.ops.dc
    for mib in MOVED_MIB:
        on_device = torch.ones(mib * 2**20, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
        bytes_ = mib * 2**20
        found[f"to host {mib}"] = bytes_ / seconds_of(lambda d=on_device, h=pinned: h.copy_(d, non_blocking=True))
        found[f"to device {mib}"] = bytes_ / seconds_of(lambda d=on_device, h=pinned: d.copy_(h, non_blocking=True))
        found[f"offload {mib}"] = bytes_ / seconds_of(
            lambda d=on_device: ops.wait_offload(ops.offload_tensor(d, 0, 7), 0, 7)
        )
        kept = ops.wait_offload(ops.offload_tensor(on_device, 0, 7), 0, 7)
        found[f"reload {mib}"] = bytes_ / seconds_of(lambda h=kept: ops.wait_reload(ops.reload_tensor(h, 0, 7), 0, 7))
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def compute() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    def offload() -> None:
        on_its_way = ops.offload_tensor(on_device, 0, 7)
        compute()
        ops.wait_offload(on_its_way, 0, 7)

    def reload() -> None:
        on_its_way = ops.reload_tensor(kept, 0, 7)
        compute()
        ops.wait_reload(on_its_way, 0, 7)

    found |= {
        "compute": seconds_of(compute),
        "offload beside": seconds_of(offload),
        "reload beside": seconds_of(reload),
    }
    pipe.send(found)
    dc.cleanup()
    dist.destroy_process_group()


def run(functions: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    pipes = []
    for function, *given in functions:
        ours, theirs = context.Pipe()
        context.Process(target=function, args=(*given, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    answers = []
    for pipe in pipes:
        if not pipe.poll(150):
            raise RuntimeError("a rank did not answer within 150 s")
        answers.append(pipe.recv())
    return answers


def main() -> int:
    options = arguments(__doc__)
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/moves_on_cuda.py: there is no GPU here; nothing was measured")
        return 0
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    report = Report("moves on one GPU")
    with tempfile.TemporaryDirectory() as folder:
        found = run([(gathers, rank, 2, folder) for rank in range(2)])[0]
    for mib in GATHERED_MIB:
        copy = found[f"copy {mib}"]
        for how in HOW:
            value = found[f"{how} {mib}"]
            report.add(
                f"gather of {mib} MiB, 2 ranks, {how}",
                value / 1e9,
                "GB/s",
                "copy",
                copy / 1e9,
                better="higher",
                ratio_bar=0.85 if how == KNOWN else None,
            )
    with tempfile.TemporaryDirectory() as folder:
        found = run([(reductions, rank, 2, folder) for rank in range(2)])[0]
    for mib in REDUCED_MIB:
        nccl = found[f"NCCL {mib}"]
        for how in (how for how in REDUCED if how != "NCCL"):
            value = found[f"{how} {mib}"]
            case = f"reduction of {mib} MiB, 2 ranks, {how}"
            report.add(case, value / 1e9, "GB/s", "NCCL", nccl / 1e9, better="higher")
    found = run([(moves,)])[0]
    for mib in MOVED_MIB:
        for ours, peer in (("offload", "to host"), ("reload", "to device")):
            value, bound = found[f"{ours} {mib}"], found[f"{peer} {mib}"]
            case, copied = f"{ours} of {mib} MiB", f"pinned copy {peer}"
            report.add(case, value / 1e9, "GB/s", copied, bound / 1e9, better="higher", ratio_bar=0.95)
    mib = MOVED_MIB[-1]
    report.add("compute beside which they run, alone", found["compute"] * 1e3, "ms")
    for ours in ("offload", "reload"):
        both = found[f"{ours} beside"]
        longer = max(found["compute"], mib * 2**20 / found[f"{ours} {mib}"])
        what = f"{ours} of {mib} MiB beside compute"
        report.add(what, both * 1e3, "ms", "the longer one alone", longer * 1e3, ratio_bar=1 / 1.1)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
