"""ZeRO-3 by hand: two processes train a small model whose parameters are sharded, through the operators of ``torch.ops.dc``.

    python examples/operators.py [--ranks N] [--steps N]

Each parameter is gathered just before its use and released right after it; what autograd saved of it is gathered again in
the backward; gradients are averaged into the shards. The same model trained in one process stands beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepcompile import dc

GRAPH = 0
SIZES = (64, 256, 256, 32)


def make_weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, m, generator=generator) / m**0.5 for m, n in zip(SIZES, SIZES[1:], strict=False)]


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, SIZES[0], generator=generator)
    return x, x[:, : SIZES[-1]].roll(1, 1)


def forward(read: Any, release: Any, x: torch.Tensor) -> torch.Tensor:
    for index in range(len(SIZES) - 1):
        x = x @ read(index).t()
        release(index)
        if index < len(SIZES) - 2:
            x = torch.tanh(x)
    return x


class ShardedModel:
    """This rank's shards, registered with the runtime."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.shards: list[torch.nn.Parameter] = []
        for index, weight in enumerate(make_weights()):
            size = -(-weight.numel() // ranks)
            padded = torch.nn.functional.pad(weight.reshape(-1), (0, size * ranks - weight.numel()))
            shard = torch.nn.Parameter(padded[rank * size : (rank + 1) * size].clone())
            dc.register_z3_param(index, weight.shape, shard, torch.zeros(size), name=f"layer{index}.weight")
            self.shards.append(shard)
        dc.register_graph_z3(GRAPH, list(range(len(self.shards))))

    def read(self, index: int) -> torch.Tensor:
        gathered = torch.ops.dc.allgather_param(self.shards[index], GRAPH, index)
        return torch.ops.dc.wait_allgather(gathered, GRAPH, index)

    def release(self, index: int) -> None:
        torch.ops.dc.release_param(torch.empty(0), GRAPH, index, 1)


def train_sharded(rank: int, ranks: int, steps: int, store_path: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, ranks), rank=rank, world_size=ranks)
    dc.init(dist.group.WORLD, {"timeout": 60}, initial_reduce_bucket_size=100_000)
    model = ShardedModel(rank, ranks)
    optimizer = torch.optim.AdamW(model.shards, lr=3e-3)
    losses = []
    for step in range(steps):
        x, target = make_batch(rank, step)
        dc.start_forward()
        loss = torch.nn.functional.mse_loss(forward(model.read, model.release, x), target)
        dc.end_forward()
        dc.start_backward(update=True)
        loss.backward()
        torch.ops.dc.end_backward(GRAPH)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    results.put((rank, losses, dc.stats(), sum(shard.nbytes for shard in model.shards)))
    dc.cleanup()
    dist.destroy_process_group()


def train_whole(ranks: int, steps: int) -> list[float]:
    weights = [torch.nn.Parameter(weight) for weight in make_weights()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    losses = []
    for step in range(steps):
        batches = [make_batch(rank, step) for rank in range(ranks)]
        outputs = [forward(lambda index: weights[index], lambda index: None, x) for x, _ in batches]
        loss = sum(torch.nn.functional.mse_loss(y, t) for y, (_, t) in zip(outputs, batches, strict=True)) / ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def show(console: Console, losses: list[float], whole: list[float], by_rank: dict[int, tuple[dict, int]]) -> None:
    table = Table(title="Training: sharded and in one process")
    for column in ("step", "loss, sharded", "loss, one process", "difference"):
        table.add_column(column, justify="right")
    for step, (ours, theirs) in enumerate(zip(losses, whole, strict=True)):
        if step % max(1, len(losses) // 8) == 0 or step == len(losses) - 1:
            table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}", f"{abs(ours - theirs):.1e}")
    console.print(table)

    table = Table(title="What each rank did")
    table.add_column("")
    for rank in sorted(by_rank):
        table.add_column(f"rank {rank}", justify="right")
    rows = {
        "parameters held (bytes)": lambda stats, shards: shards,
        "all-gathers": lambda stats, shards: stats["collectives"]["all_gather"],
        "  bytes sent to the others": lambda stats, shards: stats["bytes_sent"]["all_gather"],
        "  of them for the backward": lambda stats, shards: stats["gathers_in_backward"],
        "reduce-scatters": lambda stats, shards: stats["collectives"]["reduce_scatter"],
        "  bytes sent to owners": lambda stats, shards: stats["bytes_sent"]["reduce_scatter"],
        "gathered bytes, most at once": lambda stats, shards: stats["gathered_bytes_peak"],
        "gathered bytes, now": lambda stats, shards: stats["gathered_bytes_live"],
        "buffers reused": lambda stats, shards: f"{stats['buffers_reused']} of {stats['buffers_taken']}",
        "blocked in waits (ms)": lambda stats, shards: f"{1e3 * stats['wait_seconds']:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, *(f"{value(*by_rank[rank])}" for rank in sorted(by_rank)))
    console.print(table)
    console.print(f"The whole model has {sum(weight.nbytes for weight in make_weights())} bytes of parameters.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        arguments = [(rank, options.ranks, options.steps, store, results) for rank in range(options.ranks)]
        processes = [context.Process(target=train_sharded, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join(timeout=60)
    losses = found[0][1]
    by_rank = {rank: (stats, shard_bytes) for rank, _, stats, shard_bytes in found}
    show(Console(width=110), losses, train_whole(options.ranks, options.steps), by_rank)


if __name__ == "__main__":
    main()
