"""Plans in words and numbers: one line after planning, and rows of a table."""

from __future__ import annotations

import dataclasses

from deepcompile.compiler.segments import BACKWARD, FORWARD
from deepcompile.planning.step_planner import Step
from deepcompile.sharding.sharding import Sharding


def in_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def in_seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


@dataclasses.dataclass
class Explanation:
    """``str()`` gives the table; the fields are there for programs."""

    rows: list[tuple[str, str]]
    plan: str  # the planner's own words; empty without a plan

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        table = "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)
        return f"{table}\n\n{self.plan}" if self.plan else table


def step_rows(step: Step) -> list[tuple[str, str]]:
    """Rows about the plan of a step and its predictions."""
    assert step.plan is not None
    planned = step.plan.planned
    source = "measured times" if step.measured else "estimated times"
    rows = [("plan", f"{planned.strategy}, from {source}, hash {planned.hash}")]
    bound = planned.lower_bound_ns
    micro_batches = step.plan.micro_batches
    of = f" for {micro_batches} micro-batches" if micro_batches > 1 else ""
    rows.append(
        (
            "predicted step",
            f"{in_seconds(planned.step_ns * 1e-9)}{of}; no plan takes less than {in_seconds(bound * 1e-9)}",
        )
    )
    rows.append(("predicted exposed", in_seconds(predicted_exposed(step))))
    peak = max(planned.peak_bytes, step.plan.micro.peak_bytes)
    rows.append(("predicted peak", f"{in_bytes(peak)} of {in_bytes(planned.budget)}"))
    forward, backward = step.plan.graphs[FORWARD], step.plan.graphs[BACKWARD]
    kept = [read.param for read in forward.reads if read.keep]
    rows.append(("launches", f"{len(forward.launches)} in the forward, {len(backward.launches)} in the backward"))
    rows.append(("kept to the backward", f"{len(kept)} of {len({r.param for r in forward.reads})} parameters"))
    if micro_batches > 1:
        rows.append(("kept for all micro-batches", f"{len(step.plan.kept)} parameters"))
    return rows


def predicted_exposed(step: Step) -> float:
    """Predicted seconds of the step beyond its compute. (The step time includes collectives that stop compute.)"""
    assert step.plan is not None
    micro_batch = sum(sum(seconds) for seconds in step.seconds.values())
    compute = micro_batch * step.plan.micro_batches + step.update_seconds
    return max(0.0, step.plan.planned.step_ns * 1e-9 - compute)


def one_line(sharding: Sharding, changed: bool, why_not: str) -> str:
    step = sharding.planner.training_step()
    if step is None or step.plan is None or why_not:
        return f"deepcompile: not planned from measurements: {why_not}"
    planned = step.plan.planned
    kept = sum(read.keep for read in step.plan.graphs[FORWARD].reads)
    return (
        f"deepcompile: ZeRO-{sharding.config.stage} on {sharding.world} ranks, plan '{planned.strategy}' from measurements"
        f"{'' if changed else ' (the same as from estimates)'}: step {in_seconds(planned.step_ns * 1e-9)}, "
        f"{in_seconds(predicted_exposed(step))} of communication exposed, {kept} parameters kept to the backward, peak "
        f"{in_bytes(planned.peak_bytes)}"
    )
