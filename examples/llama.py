"""Trains a small Llama (llama_model.py) under any ZeRO stage; beside it the same model in one process, unsharded.

    python examples/llama.py [--ranks 2] [--stage 3] [--steps 30] [--layers 4] [--eager] [--bf16] [--device cpu]
    torchrun --nproc-per-node 4 examples/llama.py --stage 2

Without torchrun it starts the ranks itself. Each has a GPU of its own where there are enough of them. The data are made up:
sequences in which each token follows from the two before it, so that there is something to learn.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from llama_model import Llama
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import deepcompile


def make_batch(options: argparse.Namespace, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 64, (options.batch, options.length + 1), generator=generator)
    for position in range(2, options.length + 1):
        tokens[:, position] = (tokens[:, position - 1] * 3 + tokens[:, position - 2] * 5 + 1) % 64
    return tokens.to(options.device)


def make_model(options: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    return Llama(options.layers, options.size, length=options.length).to(options.device)


def join_ranks(options: argparse.Namespace, number_on_host: int, **where: Any) -> None:
    """Takes this rank's GPU, if it is to have one, and makes the process group."""
    if options.device == "cuda":
        torch.cuda.set_device(number_on_host)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo", **where)


def train_sharded(options: argparse.Namespace, rank: int, world: int, report: Any) -> None:
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "zero_optimization": {"stage": options.stage},
        "compile": {"enabled": not options.eager},
        "bf16": {"enabled": options.bf16},
        "gradient_clipping": 1.0,
    }
    engine = deepcompile.initialize(model, optimizer, config)
    for step in range(options.steps):
        started = time.perf_counter()
        loss = engine(make_batch(options, rank, step))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        report(("step", step, mean.item() / world, time.perf_counter() - started))
    report(("explain", engine.explain().rows))
    engine.close()


def train_alone(options: argparse.Namespace, world: int) -> list[float]:
    """The ranks' batches as one, in one process, without deepcompile."""
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        loss = torch.stack([model(make_batch(options, rank, step)) for rank in range(world)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Teller(logging.Handler):
    """Hands what the package logs to the process that shows it."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(("log", record.getMessage()))


def rank_main(rank: int, options: argparse.Namespace, folder: str, queue: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    join_ranks(options, rank, store=store, rank=rank, world_size=options.ranks)
    if rank == 0:
        logging.getLogger("deepcompile").addHandler(Teller(queue.put))
        logging.getLogger("deepcompile").setLevel(logging.INFO)
    train_sharded(options, rank, options.ranks, queue.put if rank == 0 else lambda message: None)
    dist.destroy_process_group()


def show(console: Console, options: argparse.Namespace, messages: Any, alive: Any) -> None:
    console.print(
        f"Llama of {options.layers} layers, {sum(p.numel() for p in make_model(options).parameters()):,} parameters, "
        f"ZeRO-{options.stage} on {options.ranks} processes ({options.device}), {'eager' if options.eager else 'compiled'}; "
        "the first steps compile and measure"
    )
    expected = train_alone(options, options.ranks)
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    losses: list[tuple[int, float, float]] = []
    rows: list[tuple[str, str]] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.steps)
        while not rows and alive():
            message = messages()
            if message is None:
                continue
            if message[0] == "explain":
                rows = message[1]
                continue
            if message[0] == "log":
                progress.update(task, description=message[1])
                continue
            _, step, loss, seconds = message
            losses.append((step, loss, seconds))
            text = f"loss {loss:.4f}, one process {expected[step]:.4f}, {seconds * 1e3:.0f} ms"
            progress.update(task, advance=1, description=text)
    table = Table(title="sharded and in one process")
    for column in ("step", "loss, sharded", "loss, one process", "difference", "step takes"):
        table.add_column(column, justify="right")
    for step, loss, seconds in losses:
        if step % max(1, options.steps // 8) == 0 or step == options.steps - 1:
            difference = f"{abs(loss - expected[step]) / expected[step]:.1e}"
            table.add_row(str(step), f"{loss:.5f}", f"{expected[step]:.5f}", difference, f"{seconds * 1e3:.0f} ms")
    console.print(table)
    words = Table(title="engine.explain()", show_header=False)
    for name, value in rows:
        words.add_row(name, value)
    console.print(words)
    if not rows:
        raise SystemExit("a rank died; its error is above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda if there is a GPU for each rank of this host")
    options = parser.parse_args()
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= on_this_host else "cpu")

    if "RANK" in os.environ:  # under torchrun
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        join_ranks(options, int(os.environ.get("LOCAL_RANK", 0)))
        rank, options.ranks = dist.get_rank(), dist.get_world_size()

        def tell(message: tuple[Any, ...]) -> None:
            if rank == 0 and message[0] == "step":
                print(f"step {message[1]:3d}  loss {message[2]:.5f}  {message[3] * 1e3:.0f} ms", flush=True)
            elif rank == 0:
                print("\n".join(f"{name:<24} {value}" for name, value in message[1]))

        train_sharded(options, rank, options.ranks, tell)
        dist.destroy_process_group()
        return

    import queue as standard_queue

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        queue = context.Queue()
        ranks = [context.Process(target=rank_main, args=(r, options, folder, queue)) for r in range(options.ranks)]
        for process in ranks:
            process.start()

        def next_message() -> Any:
            try:
                return queue.get(timeout=1.0)
            except standard_queue.Empty:
                return None

        def alive() -> bool:
            return all(process.exitcode in (None, 0) for process in ranks)

        try:
            show(Console(), options, next_message, alive)
        finally:
            for process in ranks:
                process.join(timeout=30)
                if process.is_alive():
                    process.kill()


if __name__ == "__main__":
    main()
