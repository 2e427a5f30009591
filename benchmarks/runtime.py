"""What the operators cost the host, on one rank, called from Python: 200 parameters of 512 KiB.

The bound is the copy itself: one read and one write of the parameter. Beside it stand a plain ``empty`` + ``copy_`` and
PyTorch's functional collectives. Also: how long it takes to register 10,000 parameters and agree on them, and what a
fused prefetch saves.
"""

from __future__ import annotations

import os
import sys
import time
import warnings

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from report import Report, arguments, interleaved

from deepcompile import dc

COUNT = 200
ELEMENTS = 131_072  # 512 KiB of fp32
ALLOWED_ABOVE_COPY = 6.0  # microseconds a parameter

#: On CUDA the device runs behind, so microseconds a parameter of the host's time alone.
ALLOWED_ON_CUDA = {"gather_ours": 10.0, "prefetch_ours": 5.0, "reduce_ours": 8.0}

ops = torch.ops.dc


def measure_operators(report: Report, rounds: int, device: str) -> None:
    dc.init(None, {}, ELEMENTS * 8, device)
    dtype = torch.float32
    elements = ELEMENTS
    if device == "cuda":
        dtype, elements = torch.bfloat16, 2 * ELEMENTS
    made = {"dtype": dtype, "device": device}
    shards = [torch.randn(elements, **made) for _ in range(COUNT)]
    buffers = [torch.zeros(elements, **made) for _ in range(COUNT)]
    gradients = [torch.randn(elements, **made) for _ in range(COUNT)]
    for index in range(COUNT):
        dc.register_z3_param(index, [elements], shards[index], buffers[index])
    dc.register_graph_z3(0, list(range(COUNT)))
    allgather, wait = ops.allgather_param.default, ops.wait_allgather.default
    prefetch, release, reduce = (
        ops.prefetch_params_fused.default,
        ops.release_param.default,
        ops.reduce_grad.default,
    )
    group = dist.group.WORLD
    empty = torch.empty(0, device=device)

    def gather_ours() -> None:
        for index in range(COUNT):
            whole = wait(allgather(shards[index], 0, index), 0, index)
            release(whole, 0, index, 1)

    def prefetch_ours() -> None:
        for first in range(0, COUNT, 10):
            ids = list(range(first, first + 10))
            prefetch(0, [empty] * 10, ids)
            for index in ids:
                release(wait(allgather(shards[index], 0, index), 0, index), 0, index, 1)

    def gather_copy() -> None:
        for index in range(COUNT):
            torch.empty(elements, **made).copy_(shards[index])

    def gather_functional() -> None:
        for index in range(COUNT):
            functional.wait_tensor(functional.all_gather_tensor(shards[index], 0, group))

    def reduce_ours() -> None:
        dc.start_backward(True)
        for index in range(COUNT):
            reduce(gradients[index], 0, index)
        ops.end_backward(0)

    def reduce_copy() -> None:
        for index in range(COUNT):
            buffers[index].copy_(gradients[index])

    def reduce_functional() -> None:
        for index in range(COUNT):
            functional.wait_tensor(functional.reduce_scatter_tensor(gradients[index], "sum", 0, group))

    functions = (
        gather_ours,
        prefetch_ours,
        gather_copy,
        gather_functional,
        reduce_ours,
        reduce_copy,
        reduce_functional,
    )
    settle = torch.cuda.synchronize if device == "cuda" else None
    medians = interleaved({function.__name__: function for function in functions}, rounds, settle)
    per_parameter = {name: seconds / COUNT * 1e6 for name, seconds in medians.items()}
    for ours, peers, case in (
        ("gather_ours", ("gather_copy", "gather_functional"), "gather + wait + release"),
        ("prefetch_ours", ("gather_copy", "gather_functional"), "gather + wait + release, prefetched in tens"),
        ("reduce_ours", ("reduce_copy", "reduce_functional"), "reduce"),
    ):
        for peer in peers:
            name = (
                "empty + copy_"
                if peer == "gather_copy"
                else "copy_"
                if peer == "reduce_copy"
                else "functional collective"
            )
            copies = peer == peers[0]
            report.add(
                case,
                per_parameter[ours],
                "us/parameter",
                name,
                per_parameter[peer],
                bar=ALLOWED_ON_CUDA[ours] if device == "cuda" and copies else None,
                ratio_bar=2.0 if device == "cpu" and not copies else None,
            )
        if device == "cpu":
            above = per_parameter[ours] - per_parameter[peers[0]]
            report.add(f"{case}: above the copy", above, "us/parameter", bar=ALLOWED_ABOVE_COPY)
    dc.cleanup()


def measure_registration(report: Report, count: int = 10_000) -> None:
    shards = [torch.zeros(4) for _ in range(count)]
    buffers = [torch.zeros(4) for _ in range(count)]
    dc.init(None, {}, 1000)
    begin = time.perf_counter()
    for index in range(count):
        dc.register_z3_param(index, [2, 2], shards[index], buffers[index], name=f"layer.{index}.weight")
    dc.register_graph_z3(0, list(range(count)))
    dc.start_forward()
    took = time.perf_counter() - begin
    dc.end_forward()
    exchanges = dc.stats()["collectives"]["exchange"]
    dc.cleanup()
    report.add(f"register {count} parameters and agree", took, "s", bar=2.0)
    report.add("to agree", exchanges, "collectives", bar=1)


def main() -> int:
    options = arguments(__doc__, device=True)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    if options.device == "cuda":
        # A thread that moves from core to core takes a third longer for everything here, our operators and PyTorch's alike.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    report = Report(f"Host cost of the operators, one rank, one thread, {options.device}")
    # On CUDA a machine that is shared: enough rounds that its quick and its slow seconds are both in.
    rounds = 7 if options.quick else 31 if options.device == "cpu" else 101
    measure_operators(report, rounds, options.device)
    if options.device == "cpu":
        measure_registration(report)
    status = report.finish(options)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
