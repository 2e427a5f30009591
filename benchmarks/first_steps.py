"""The first steps: how long until the plan from measurements is active, against plain ``torch.compile`` for as many steps.

Two ranks of one thread train a Llama. A job compiles with empty caches, then a second job starts from what the first has
cached; each beside two compiled processes that share nothing. What planning again costs is measured in the second job: the
time of the exchange of schedules for this model, and how many graphs were compiled from the first plan on (none may be).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any

from report import Report, arguments

RANKS = 2
PROFILE_STEPS = 3
#: The first compiles, the next are measured; the plan from them is active in the last.
STEPS = PROFILE_STEPS + 2


def serve(name: str, rank: int, folder: str, pipe: Any, quick: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    sharded = name == "deepcompile"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache-{name.replace(' ', '-')}-{rank}"
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    import torch
    import torch._inductor.compile_fx as inductor
    import torch.distributed as dist
    from llama_model import Llama

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(2 if quick else 6, 384, heads=6, vocabulary=4096, length=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(rank))
    compiled = 0
    inner = inductor.compile_fx_inner

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return inner(*args, **kwargs)

    inductor.compile_fx_inner = counted
    if sharded:
        import deepcompile

        store = dist.FileStore(f"{folder}/store-{os.getppid()}-{pipe.recv()}", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        engine = deepcompile.initialize(
            model, optimizer, {"zero_optimization": {"stage": 3}, "compile": {"profile_steps": PROFILE_STEPS}}
        )

        def train() -> None:
            engine.backward(engine(batch))
            engine.step()
    else:
        pipe.recv()
        forward = torch.compile(model)

        def train() -> None:
            forward(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    times, graphs = [], 0
    for step in range(STEPS):
        started = time.perf_counter()
        train()
        times.append(time.perf_counter() - started)
        graphs = compiled if step == 0 else graphs
    found = {"seconds": sum(times), "compiled": compiled, "later": compiled - graphs, "replanned": 0.0, "reads": 0}
    if sharded:
        assert engine.profile.done and not engine.profile.why_not, engine.profile.why_not
        found |= replan(engine)
        dist.destroy_process_group()
    pipe.send(found)


def replan(engine: Any) -> dict[str, float]:
    """The time from a new plan to its being what the graphs run by: schedules are made and exchanged."""
    from deepcompile.compiler.reads import reads_of
    from deepcompile.planning.step_plan import graph_schedule
    from deepcompile.runtime.load import _C

    step = engine.sharding.planner.training_step()
    reads = sum(len(reads_of(segments)) for segments in step.graphs.values())
    started = time.perf_counter()
    step.plan.schedules = {
        phase: _C.StepSchedule(graph_schedule(step.plan.graphs[phase], segments, phase))
        for phase, segments in step.graphs.items()
    }
    return {"replanned": time.perf_counter() - started, "reads": reads}


def run(name: str, job: str, folder: str, quick: bool) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(name, rank, folder, theirs, quick), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.send(job)
    found = []
    for pipe in pipes:
        if not pipe.poll(900):
            raise RuntimeError(f"{name} did not answer within 900 s")
        found.append(pipe.recv())
    for process in processes:
        process.join(timeout=20)
    return found


def main() -> int:
    options = arguments(__doc__)
    report = Report(f"the first {STEPS} steps of a Llama on two ranks, until the measured plan is active")
    bars = {"cold": 1.05, "warm": 1.10}
    with tempfile.TemporaryDirectory() as folder:
        for job in bars:
            seconds = {}
            for name in ("plain compiled", "deepcompile"):
                found = run(name, job, folder, options.quick)
                seconds[name] = max(one["seconds"] for one in found)
            plain = seconds["plain compiled"]
            report.add(f"{job} caches", seconds["deepcompile"], "s", "plain compiled", plain, ratio_bar=1 / bars[job])
            later = max(one["later"] for one in found)
            report.add(f"{job} caches, graphs compiled after the first step", later, "graphs", bar=0)
        reads = found[0]["reads"]
        per_thousand = max(one["replanned"] for one in found) * 1e3 * 1000 / reads
        report.add(f"new schedules, of {reads} reads", per_thousand, "ms/1000 reads", bar=50)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
