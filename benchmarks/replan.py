"""What it takes to plan a step again, in one process, by its parts: from two cut graphs to the schedules that they run by.

The steps are made up: layers of seven weights, each read once in forward and once in backward. Times are of one core. Ranks
agree on a plan besides, which takes an exchange or two.
"""

from __future__ import annotations

import sys
import time

import torch
from report import Report, arguments

from deepcompile import plan as planner
from deepcompile.compiler.segments import BACKWARD, FORWARD, GatheredParam, Segment, Segments
from deepcompile.compiler.step_outline import Saved
from deepcompile.planning.step_graph import ParamMetadata, step_graph
from deepcompile.planning.step_plan import graph_schedule, step_plan
from deepcompile.runtime.load import _C

WORLD = 2
SHAPES = [(1024, 1024)] * 4 + [(2816, 1024)] * 2 + [(1024, 2816)]


def replan(reads: int, machine: planner.Machine, free: float) -> dict[str, float]:
    """Seconds by part. ``free``: memory beyond the least, as a part of it."""
    names = [f"layers.{index // len(SHAPES)}.w{index % len(SHAPES)}" for index in range(reads // 2)]
    params = {
        name: GatheredParam(name, SHAPES[index % len(SHAPES)], torch.bfloat16) for index, name in enumerate(names)
    }
    graphs = {
        FORWARD: Segments(params, [Segment(None, [name], workspace=1 << 20) for name in names], {}),
        BACKWARD: Segments(params, [Segment(None, [name], [name], workspace=2 << 20) for name in names[::-1]], {}),
    }
    facts = {
        name: ParamMetadata(
            param.bytes // WORLD, param.bytes, 6 * param.bytes // WORLD, False, 2 * param.bytes // WORLD
        )
        for name, param in params.items()
    }
    seconds = {
        phase: [times * 25e-12 * params[segment.uses[0]].bytes for segment in graphs[phase].segments]
        for phase, times in ((FORWARD, 1), (BACKWARD, 2))
    }
    saved = [Saved(index, len(names) - 1 - index, 4 << 20) for index in range(len(names))]

    def graph() -> planner.StepGraph:
        return step_graph("step", graphs, facts, WORLD, seconds, saved, 1e-6 * reads)

    budget = int((1 + free) * planner.least_budget(graph(), machine))
    begin = time.process_time()
    made = graph()
    drawn = time.process_time()
    planned = planner.plan(made, machine, budget)
    chosen = time.process_time()
    read = step_plan(planned, graphs, facts)
    understood = time.process_time()
    for phase, segments in graphs.items():
        _C.StepSchedule(graph_schedule(read.graphs[phase], segments, phase))
    end = time.process_time()
    return {
        "step graph": drawn - begin,
        "plan, proof, prediction, bound": chosen - drawn,
        "what each graph does": understood - chosen,
        "schedules": end - understood,
        "all": end - begin,
    }


def main() -> int:
    options = arguments(__doc__)
    report = Report("planning a step again, time of one core")
    for preset, free in (("8xh100", 10.0), ("8xh100", 0.03), ("2xcpu", 10.0), ("2xcpu", 0.03)):
        machine = planner.preset(preset).replace(devices=WORLD, offload="no")
        for reads in [100, 1000] if options.quick else [100, 1000, 10000]:
            runs = [replan(reads, machine, free) for _ in range(1 if reads > 1000 else 5)]
            case = f"{preset}, {100 * free:.0f} % free, {reads} reads"
            best = min(runs, key=lambda run: run["all"])
            for part, seconds in best.items():
                bar = 50 if reads == 1000 and part == "all" else None
                report.add(f"{case}: {part}", seconds * 1e3, "ms", bar=bar)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
