"""The part of ``benchmarks/train.py`` that runs on CUDA: a Llama of 16 layers, 2048 wide, bf16, fused AdamW for all.

One rank, and two ranks that share one GPU: over NCCL where it lets them (2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1, and the
multi-process service). Every system lives in processes of its own; they compile at the same time, then take turns of some
steps. A core of a shared machine is half as fast in one second as in the next, so two systems are compared round by round,
and what counts is the median of these ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from report import Report

LAYERS, SIZE, HEADS, VOCABULARY = 16, 2048, 16, 32000
TOKENS_PER_TURN = 4096
CORES_A_RANK = 4
WARM_STEPS = 12

OURS = "deepcompile ZeRO-3"
ONE_RANK = {
    OURS: 1,
    f"{OURS}, gathers": 1,
    "plain compiled": 1,
    "FSDP2 compiled": 1,
}
TWO_RANKS = {
    OURS: 2,
    f"{OURS}, lean": 2,  # within the least budget
    "FSDP2 compiled": 2,
    "DeepSpeed DeepCompile": 2,  # where it is installed (requirements-peers.txt)
    "plain compiled": 2,  # two processes that share nothing
}


def build(name: str, model: Any, world: int, micro_batch: int) -> Any:
    """A function that trains one step on a batch, and one that tells more."""
    import torch

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    if name.startswith("deepcompile"):
        import deepcompile

        zero = {"stage": 3, "gather_at_one_rank": name.endswith("gathers")}
        config: dict[str, Any] = {"zero_optimization": zero, "timeout": 120}
        if name.endswith("lean"):
            config["memory_budget"] = "least"
        engine = deepcompile.initialize(model, adamw(), config)

        def train(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss

        return train, lambda: engine.explain().rows

    if name.startswith("DeepSpeed"):
        return _deepspeed(model, adamw(), micro_batch), lambda: []

    if name.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (world,))
        for block in model.blocks:
            block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        forward = model
    else:
        forward = torch.compile(model)
    optimizer = adamw()

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: []


def _deepspeed(model: Any, optimizer: Any, micro_batch: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 3},
        "compile": {"deepcompile": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.compile()

    def train(batch: Any) -> Any:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss

    return train


def serve(name: str, rank: int, world: int, shape: tuple[int, int], layers: int, folder: str, pipe: Any) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{''.join(c for c in name if c.isalnum())}"
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import torch
    import torch.distributed as dist
    from llama_model import Llama

    torch.cuda.set_device(0)
    if not name.startswith("plain"):
        store = dist.FileStore(f"{folder}/{name}", world)
        limit = datetime.timedelta(seconds=300)
        backend = "gloo" if name.startswith("deepcompile") else "cpu:gloo,cuda:nccl"
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))  # DeepSpeed asks for them
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(layers, SIZE, HEADS, VOCABULARY, shape[1]).bfloat16()
    batch = torch.randint(0, VOCABULARY, (shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(rank)).cuda()
    train, more = build(name, model, world, shape[0])
    started = time.perf_counter()
    loss = train(batch).item()
    first = time.perf_counter() - started
    for _ in range(WARM_STEPS):  # plans are made from measurements in these
        loss = train(batch).item()
    warm = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    _pin(rank)
    pipe.send((first, warm, loss))
    while (command := pipe.recv()) != "stop":
        if command == "more":
            pipe.send((more(), torch.cuda.max_memory_allocated() / 2**30))
            continue
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps_a_turn(shape)):
            train(batch)
        torch.cuda.synchronize()
        pipe.send((time.perf_counter() - started) / steps_a_turn(shape))
    if dist.is_initialized():
        dist.destroy_process_group()


def steps_a_turn(shape: tuple[int, int]) -> int:
    return max(4, TOKENS_PER_TURN // (shape[0] * shape[1]))


def _pin(rank: int) -> None:
    """All systems take turns on the same cores: which ones the scheduler finds is worth a fifth of a host-bound step. The
    threads that launch kernels, Python's own and autograd's, run in turn: they share a core, and all others have the rest.
    """
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[rank * CORES_A_RANK : (rank + 1) * CORES_A_RANK]
    for thread in os.listdir("/proc/self/task") if len(mine) == CORES_A_RANK else ():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # a thread that has ended meanwhile
            with open(f"/proc/self/task/{thread}/comm") as file:
                launches = int(thread) == os.getpid() or file.read().startswith("pt_autograd")
            os.sched_setaffinity(int(thread), mine[:1] if launches else mine[1:])


class System:
    def __init__(self, name: str, world: int, shape: tuple[int, int], layers: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.pipes, self.processes, self.times = name, [], [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (name, rank, world, shape, layers, folder, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self, timeout: float = 420) -> list[Any]:
        found = []
        for pipe in self.pipes:
            if not pipe.poll(timeout):
                raise RuntimeError(f"{self.name} did not answer within {timeout} s")
            found.append(pipe.recv())
        return found

    def ask(self, command: str) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(command)
        return self.answers()

    def stop(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send("stop")
            except BrokenPipeError:
                continue  # it is gone already
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


class Measured:
    """Seconds of a step, by system, in each round. What is not there could not run, and has said why."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds

    def milliseconds(self, name: str) -> list[float]:
        """The quartiles."""
        return [1e3 * quartile for quartile in statistics.quantiles(self.seconds[name], method="inclusive")]

    def times_as_long(self, name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True))


def compare(
    report: Report,
    names: dict[str, int],
    shape: tuple[int, int],
    layers: int,
    turns: int,
    bars: dict[tuple[str, str], float],
) -> None:
    """``bars``: the least ratio, by ours and the peer."""
    world = max(names.values())
    case = f"{world} rank{'s' if world > 1 else ''}, batch {shape[0]} x {shape[1]}"
    print(f"-- {case}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        systems = {name: System(name, count, shape, layers, folder) for name, count in names.items()}
        firsts: dict[str, float] = {}
        for name, system in list(systems.items()):
            try:
                answers = system.answers()
            except (EOFError, RuntimeError) as error:
                print(f"{name}: did not run ({type(error).__name__}: {error})", flush=True)
                systems.pop(name).stop()
                continue
            firsts[name] = max(first for first, _, _ in answers)
            warm, loss = max(warm for _, warm, _ in answers), answers[0][2]
            print(
                f"{name:<28} first step {firsts[name]:6.1f} s, all {WARM_STEPS + 1} steps {warm:6.1f} s, loss {loss:.4f}",
                flush=True,
            )
        for turn in range(turns):
            in_turn = list(systems.values())
            for system in in_turn if turn % 2 == 0 else reversed(in_turn):
                taken = max(system.ask("turn"))
                if turn > 0:
                    system.times.append(taken)
        measured = Measured({name: system.times for name, system in systems.items()})
        peaks: dict[str, float] = {}
        for name, system in systems.items():
            rows, peak = system.ask("more")[0]
            peaks[name] = peak
            low, middle, high = measured.milliseconds(name)
            print(
                f"{name:<28} {middle:8.1f} ms a step (half of the turns {low:.1f} to {high:.1f}), peak {peak:.1f} GiB",
                flush=True,
            )
            for key, value in rows:
                print(f"    {key:<28} {value}")
            system.stop()
    for ours in (name for name in peaks if name.startswith("deepcompile")):
        for peer in (name for name in peaks if not name.startswith("deepcompile")):
            middles = [measured.milliseconds(name)[1] for name in (ours, peer)]
            ratio = measured.times_as_long(peer, ours)
            report.add(f"{case}: {ours}", middles[0], "ms", peer, middles[1], ratio, ratio_bar=bars.get((ours, peer)))
            ratio_bar = 1.0 if peer == "FSDP2 compiled" else None
            report.add(f"{case}: {ours}, peak", peaks[ours], "GiB", peer, peaks[peer], ratio_bar=ratio_bar)
        if "plain compiled" in firsts:
            plain = firsts["plain compiled"]
            report.add(f"{case}: {ours}, first step", firsts[ours], "s", "plain compiled", plain, ratio_bar=1 / 1.3)
    for ours, peer in bars:
        if ours not in measured.seconds or peer not in measured.seconds:
            report.bar_not_measured(f"{case}: {ours} against {peer}")


def main(options: argparse.Namespace) -> int:
    report = Report(f"a step of Llama, {LAYERS} layers, {SIZE} wide, bf16, one GPU")
    layers, turns = (4, 3) if options.quick else (LAYERS, 8)
    small, large = (1, 512), (4, 2048)
    shapes = {"small": [small], "large": [large], None: [small, large]}[options.batch]

    def measure(names: dict[str, int], shape: tuple[int, int], bars: dict[tuple[str, str], float]) -> None:
        left_out = options.without.split(",") if options.without else []
        wanted = {name: count for name, count in names.items() if not any(word in name for word in left_out)}
        compare(report, wanted, shape, layers, turns if shape == large else 4 * turns, bars)

    for shape in shapes if options.ranks != 2 else []:
        bars = {
            (OURS, "plain compiled"): 1 / 1.05,
            (f"{OURS}, gathers", "plain compiled"): 1 / 1.15,
            (OURS, "FSDP2 compiled"): 2.5 if shape == small else 1.05,
        }
        measure(ONE_RANK, shape, bars)
    for shape in shapes if options.ranks != 1 else []:
        if shape == small:
            bars = {(OURS, peer): 1.4 for peer in ("FSDP2 compiled", "DeepSpeed DeepCompile")}
        else:
            bars = {(OURS, "plain compiled"): 1 / 1.05}
        measure(TWO_RANKS, shape, bars)
    return report.finish(options)
