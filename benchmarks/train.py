"""A training step of a Llama on two ranks of one thread: deepcompile against FSDP2, DDP and processes that share nothing.

Every system lives in processes of its own for the whole run; they take turns, some steps each, and what counts is the median
over all turns. "Two alone" are two compiled processes that run side by side and share nothing: no sharded training on the
same cores can be faster than that by more than its smaller optimizer.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from report import Report, arguments

RANKS = 2
STEPS_PER_TURN = 3

#: name -> number of processes
SYSTEMS = {
    "deepcompile ZeRO-3": 2,
    "deepcompile ZeRO-2": 2,
    "FSDP2 eager, gloo": 2,
    "FSDP2 compiled, gloo": 2,
    "FSDP2 eager, shm": 2,
    "FSDP2 compiled, shm": 2,
    "DDP compiled, gloo": 2,
    "one process": 1,
    "one process compiled": 1,
    "two alone, compiled": 2,
}

ALONE = "two alone, compiled"
#: How many times as fast a ZeRO-3 step is to be.
RATIO_BARS = {
    "FSDP2 eager, gloo": 1.6,
    "FSDP2 compiled, gloo": 1.6,
    "FSDP2 eager, shm": 1.1,
    "FSDP2 compiled, shm": 1.1,
    ALONE: 1 / 1.15,
}


def build(name: str, model: Any) -> Any:
    """A function that trains one step on a batch, one that tells more (``more(what, batch)``), and one that says whether its
    plan is the last.
    """
    import torch
    import torch.distributed as dist

    if name.startswith("deepcompile"):
        import deepcompile

        modes = {"replay": "replay", "on demand": "off"}
        mode = next((mode for words, mode in modes.items() if words in name), "compile")
        stage = int(name[-1])
        engine = deepcompile.initialize(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            {"zero_optimization": {"stage": stage}, "compile": {"mode": mode}},
        )

        def train(batch: torch.Tensor) -> float:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss.item()

        def more(what: str, batch: torch.Tensor) -> Any:
            if what == "more":
                return engine.explain().rows
            import recorded_steps

            return getattr(recorded_steps, what)(engine, lambda: train(batch))

        return train, more, lambda: engine.profile.done

    if name.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif name.startswith("DDP"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name.startswith(("FSDP2", "DDP")):
        assert dist.get_world_size() == RANKS
    forward = torch.compile(model) if "compiled" in name else model

    def step(batch: torch.Tensor) -> float:
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, lambda what, batch: [], lambda: True


def serve(name: str, rank: int, folder: str, pipe: Any, quick: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    key = "".join(c for c in name if c.isalnum())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{key}"  # first steps compile everything
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import torch
    import torch.distributed as dist
    from llama_model import Llama

    torch.set_num_threads(1)
    alone = name.startswith(("one", "two"))
    if not alone:
        store = dist.FileStore(f"{folder}/{key}", RANKS)
        import deepcompile as deepcompile  # registers the backend shm

        backend = "shm" if name.endswith("shm") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Llama(2 if quick else 6, 384, heads=6, vocabulary=4096, length=128)
    batch = torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(rank))
    train, more, settled = build(name, model)
    started = time.perf_counter()
    loss = train(batch)
    first = time.perf_counter() - started
    while not settled():
        train(batch)
    active = time.perf_counter() - started
    while True:
        command = pipe.recv()
        if command == "stop":
            break
        if command == "first":
            pipe.send((first, active, loss))
        elif command != "turn":
            pipe.send(more(command, batch))
        else:
            times = []
            for _ in range(STEPS_PER_TURN):
                started = time.perf_counter()
                train(batch)
                times.append(time.perf_counter() - started)
            pipe.send(times)
    if not alone:
        dist.destroy_process_group()


class System:
    """The processes of one system."""

    def __init__(self, name: str, folder: str, quick: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.pipes, self.processes = name, [], []
        self.times: list[float] = []
        for rank in range(SYSTEMS.get(name, RANKS)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, rank, folder, theirs, quick), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, command: str, timeout: float = 600) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(command)
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(timeout):
                raise RuntimeError(f"{self.name} did not answer within {timeout} s")
            answers.append(pipe.recv())
        return answers

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()


def main() -> int:
    options = arguments(__doc__, device=True)
    if options.device == "cuda":
        import train_on_cuda

        return train_on_cuda.main(options)
    report = Report("a step of Llama, 384 wide, batch 2 x 128, fp32, two ranks of one thread")
    turns = 4 if options.quick else 12
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, System] = {}
        firsts: dict[str, float] = {}
        actives: dict[str, float] = {}  # until the plan from measurements is active
        for name in SYSTEMS:  # one after the other: first steps are measured, too
            systems[name] = System(name, folder, options.quick)
            answers = systems[name].ask("first")
            firsts[name] = max(first for first, _, _ in answers)
            actives[name] = max(active for _, active, _ in answers)
            print(f"{name:<24} first step {firsts[name]:6.1f} s, loss {answers[0][2]:.4f}", flush=True)
        for turn in range(turns):
            for system in systems.values():
                answers = system.ask("turn")
                if turn > 0:  # the first turn warms up
                    system.times += [max(times) for times in zip(*answers, strict=True)]
        rows = systems["deepcompile ZeRO-3"].ask("more")[0]
        for system in systems.values():
            system.stop()
    medians = {name: statistics.median(system.times) * 1e3 for name, system in systems.items()}
    ours = medians["deepcompile ZeRO-3"]
    for name, value in medians.items():
        if name != "deepcompile ZeRO-3":
            report.add("ZeRO-3 step", ours, "ms", name, value, ratio_bar=RATIO_BARS.get(name))
    first, active = firsts["deepcompile ZeRO-3"], actives["deepcompile ZeRO-3"]
    plain, alone = firsts[ALONE], f"{ALONE}, first step"
    report.add("first step", first, "s", alone, plain, ratio_bar=1 / 1.3)
    report.add("until the measured plan is active", active, "s", alone, plain, ratio_bar=1 / 2.5)
    status = report.finish(options)
    print("\n".join(f"{name:<24} {value}" for name, value in rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
