"""What an engine did, in words and numbers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

from deepcompile.engine.engine_replay import ReplayProfile
from deepcompile.planning.report import Explanation, in_bytes, in_seconds, step_rows
from deepcompile.planning.step_planner import Step

if TYPE_CHECKING:
    from deepcompile.engine.engine import Engine


@dataclasses.dataclass
class StepTimes:
    """How long the last steps took and how long their callers waited for collectives, in seconds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    waited: list[float] = dataclasses.field(default_factory=list)
    _began: float = 0.0
    _waited_before: float = 0.0

    def begin(self, waited: float) -> None:
        if not self._began:
            self._began, self._waited_before = time.perf_counter(), waited

    def end(self, waited: float) -> None:
        if self._began:
            self.seconds = [*self.seconds[-49:], time.perf_counter() - self._began]
            self.waited = [*self.waited[-49:], waited - self._waited_before]
            self._began = 0.0

    def forget(self) -> None:
        """After a new plan, times of earlier steps no longer count."""
        self.seconds, self.waited, self._began = [], [], 0.0


def explain(engine: Engine) -> Explanation:
    sharding, stats = engine.sharding, engine.stats()
    rows: list[tuple[str, str]] = [
        ("model", f"{type(engine.module).__name__}, {sum(s.numel for s in sharding.params):,} parameters"),
        ("sharding", f"ZeRO-{engine.config.stage} over {sharding.world} ranks; this is rank {sharding.rank}"),
        ("precision", _precision(engine)),
    ]
    step = sharding.planner.training_step() if engine.config.compile.mode == "compile" else None
    graph = engine.profile.graph if isinstance(engine.profile, ReplayProfile) else None
    rows += graph.rows() if graph is not None else _plan_rows(engine, step)
    times = engine.times
    if times.seconds:
        measured = f"{in_seconds(statistics.median(times.seconds))} (median of {len(times.seconds)})"
        rows.append(("measured step", measured))
        if sharding.runtime.device.type == "cpu":  # on CUDA the device waits, which the host cannot time
            waited = f"{in_seconds(statistics.median(times.waited))} a step"
            if sharding.collectives_stop_compute:
                waited += ", all collectives: they run on the caller's thread"
            rows.append(("exposed collectives", waited))
    gathers, reductions = (stats["collectives"][kind] for kind in ("all_gather", "reduce_scatter"))
    rows.append(("collectives so far", f"{gathers} gathers, {reductions} reductions"))
    rows.append(("bytes sent so far", in_bytes(sum(stats["bytes_sent"].values()))))
    held = sum(s.param.nbytes for s in sharding.params)
    rows.append(
        (
            "parameter shards",
            f"{in_bytes(held)} of {in_bytes(sum(s.numel * s.param.element_size() for s in sharding.params))}",
        )
    )
    if engine.config.offloads_states:
        rows.append(("optimizer states", _states(engine)))
    rows.append(("gathered at most", in_bytes(stats["gathered_bytes_peak"])))
    rows.append(("steps", f"{engine.steps} taken, {engine.skipped_steps} skipped"))
    words = step.plan.planned.explain(20) if step is not None and step.plan is not None else ""
    return Explanation(rows, graph.explain().plan if graph is not None else words)


def _states(engine: Engine) -> str:
    offload = engine.offload
    if offload is None:
        return "in host memory, which is where the model is" if engine.optimizer is not None else "no optimizer"
    stats = engine.stats()
    moved = f"{in_bytes(stats['bytes_offloaded'])} to the host and {in_bytes(stats['bytes_reloaded'])} back so far"
    return f"{offload.words()}; {moved}"


def _precision(engine: Engine) -> str:
    dtype = engine.config.compute_dtype
    if dtype is None:
        return "the parameters' own"
    scale = f", loss scale {engine.loss_scale.value:g}" if engine.config.fp16.enabled else ""
    return f"{str(dtype).removeprefix('torch.')} with fp32 master shards{scale}"


def _plan_rows(engine: Engine, step: Step | None) -> list[tuple[str, str]]:
    options = engine.config.compile
    if options.mode == "off":
        return [("compiled", "no: config key 'compile.enabled' or 'compile.mode' switches it off")]
    if options.mode == "replay":
        why = engine.profile.why_not or "the first iterations are being recorded"
        return [("replay", f"nothing is active, parameters are gathered on demand: {why}")]
    if engine.sharding.single_rank:
        return [
            (
                "compiled",
                f"by {options.backend}, without a plan: the only rank has every parameter, nothing is gathered",
            )
        ]
    graphs = engine.sharding.planner.steps
    if not graphs:
        return [("compiled", "nothing yet: no forward has run, or every frame was skipped")]
    rows = [("compiled", f"{len(graphs)} graph{'s' if len(graphs) != 1 else ''} by {options.backend}")]
    if step is None or step.plan is None:
        why = step.why_not if step is not None else "the step is spread over several graphs, each planned alone"
        if step is None and engine.profile.why_not:
            why += f"; {engine.profile.why_not}"
        return [*rows, ("plan", f"none for the step as a whole: {why}")]
    rows += step_rows(step)
    by_size = "by the size of the buckets"
    planned_buckets = f"{len(step.plan.reductions)} in a backward, as planned"
    rows.append(("reductions", planned_buckets if engine.sharding.planner.plans_reductions else by_size))
    if engine.drift.history:
        expected, found = engine.drift.history[-1]
        times = f"{len(engine.drift.history)} times" if len(engine.drift.history) > 1 else "once"
        rows.append(
            ("planned again", f"{times}, last when a step went from {in_seconds(expected)} to {in_seconds(found)}")
        )
    if not step.measured and engine.profile.done and engine.profile.why_not:
        rows.append(("not measured", engine.profile.why_not))
    return rows
