"""What an engine did, in words and numbers: one line after planning, a table, a trace for Perfetto."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import time
from typing import TYPE_CHECKING, Any

from deepcompile.planning.step_graph import BACKWARD, FORWARD

if TYPE_CHECKING:
    from deepcompile.engine.engine import Engine
    from deepcompile.planning.step_planner import Step
    from deepcompile.sharding.sharding import Sharding


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
        """After a new plan, only what comes counts."""
        self.seconds, self.waited, self._began = [], [], 0.0


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def _seconds(value: float) -> str:
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


def explain(engine: Engine) -> Explanation:
    from deepcompile.engine.engine_replay import ReplayProfile  # it uses this module

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
        measured = f"{_seconds(statistics.median(times.seconds))} (median of {len(times.seconds)})"
        rows.append(("measured step", measured))
        if sharding.runtime.device.type == "cpu":  # elsewhere it is the device that waits, and not the program
            waited = f"{_seconds(statistics.median(times.waited))} a step"
            if sharding.collectives_stop_compute:
                waited += ", all of them: they run on the caller's thread"
            rows.append(("exposed collectives", waited))
    gathers, reductions = (stats["collectives"][kind] for kind in ("all_gather", "reduce_scatter"))
    rows.append(("collectives so far", f"{gathers} gathers, {reductions} reductions"))
    rows.append(("bytes sent so far", _bytes(sum(stats["bytes_sent"].values()))))
    held = sum(s.param.nbytes for s in sharding.params)
    rows.append(
        (
            "parameter shards",
            f"{_bytes(held)} of {_bytes(sum(s.numel * s.param.element_size() for s in sharding.params))}",
        )
    )
    if engine.config.offloads_states:
        rows.append(("optimizer states", _states(engine)))
    rows.append(("gathered at most", _bytes(stats["gathered_bytes_peak"])))
    rows.append(("steps", f"{engine.steps} taken, {engine.skipped_steps} skipped"))
    words = step.plan.planned.explain(20) if step is not None and step.plan is not None else ""
    return Explanation(rows, graph.explain().plan if graph is not None else words)


def _states(engine: Engine) -> str:
    offload = engine.offload
    if offload is None:
        return "in host memory, which is where the model is" if engine.optimizer is not None else "no optimizer"
    stats = engine.stats()
    moved = f"{_bytes(stats['bytes_offloaded'])} to the host and {_bytes(stats['bytes_reloaded'])} back so far"
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
    if engine.sharding.whole:
        return [
            ("compiled", f"by {options.backend}, without a plan: one rank has every parameter, nothing is gathered")
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
        rows.append(("planned again", f"{times}, last when a step went from {_seconds(expected)} to {_seconds(found)}"))
    if not step.measured and engine.profile.done and engine.profile.why_not:
        rows.append(("not measured", engine.profile.why_not))
    return rows


def step_rows(step: Step) -> list[tuple[str, str]]:
    """What the plan of a step is and what it is predicted to give."""
    assert step.plan is not None
    planned = step.plan.planned
    source = "measured times" if step.measured else "estimated times"
    rows = [("plan", f"{planned.strategy}, from {source}, hash {planned.hash}")]
    bound = planned.lower_bound_ns
    micro_batches = step.plan.micro_batches
    of = f" for {micro_batches} micro-batches" if micro_batches > 1 else ""
    rows.append(
        ("predicted step", f"{_seconds(planned.step_ns * 1e-9)}{of}; no plan takes less than {_seconds(bound * 1e-9)}")
    )
    rows.append(("predicted exposed", _seconds(predicted_exposed(step))))
    peak = max(planned.peak_bytes, step.plan.micro.peak_bytes)
    rows.append(("predicted peak", f"{_bytes(peak)} of {_bytes(planned.budget)}"))
    forward, backward = step.plan.graphs[FORWARD], step.plan.graphs[BACKWARD]
    kept = [take.param for take in forward.takes if take.keep]
    rows.append(("launches", f"{len(forward.launches)} in the forward, {len(backward.launches)} in the backward"))
    rows.append(("kept to the backward", f"{len(kept)} of {len({t.param for t in forward.takes})} parameters"))
    if micro_batches > 1:
        rows.append(("kept for all micro-batches", f"{len(step.plan.kept)} parameters"))
    return rows


def predicted_exposed(step: Step) -> float:
    """What the step takes beyond its compute, in seconds. Where a collective stops compute, the planner counts it there."""
    assert step.plan is not None
    micro_batch = sum(sum(seconds) for seconds in step.seconds.values())
    compute = micro_batch * step.plan.micro_batches + step.update_seconds
    return max(0.0, step.plan.planned.step_ns * 1e-9 - compute)


def one_line(sharding: Sharding, changed: bool, why_not: str) -> str:
    step = sharding.planner.training_step()
    if step is None or step.plan is None or why_not:
        return f"deepcompile: not planned from measurements: {why_not}"
    planned = step.plan.planned
    kept = sum(take.keep for take in step.plan.graphs[FORWARD].takes)
    return (
        f"deepcompile: ZeRO-{sharding.config.stage} on {sharding.world} ranks, plan '{planned.strategy}' from measurements"
        f"{'' if changed else ' (the same as from estimates)'}: step {_seconds(planned.step_ns * 1e-9)}, "
        f"{_seconds(predicted_exposed(step))} of communication exposed, {kept} parameters kept to the backward, peak "
        f"{_bytes(planned.peak_bytes)}"
    )


def trace_path(path: str | os.PathLike[str]) -> str:
    """Checked when it is asked for: the step that is traced is worth more than its trace."""
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"trace: {os.fspath(path)!r} is in a folder that does not exist")
    return os.fspath(path)


def write_trace(path: str, events: str) -> None:
    """Several ranks may write to one path: the file is that of one of them, whole."""
    temporary = pathlib.Path(f"{path}.{os.getpid()}.part")
    temporary.write_text(events)
    temporary.replace(path)


def trace_events(sharding: Sharding, spans: list[tuple[str, int, int, int, int]]) -> str:
    """Chrome's trace format: what the caller waited for, and what ran on the channels."""
    names = {sharded.id: sharded.name for sharded in sharding.params}
    tracks = {"take": (0, "program: waits for parameters"), "grad": (1, "program: gives gradients")}
    tracks |= {"gather": (2, "gather channel"), "reduce": (3, "reduce channel")}
    begin = min((span[3] for span in spans), default=0)
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": sharding.rank, "tid": tid, "args": {"name": name}}
        for tid, name in tracks.values()
    ]
    for kind, parameter, size, start, end in spans:
        events.append(
            {
                "name": names.get(parameter, str(parameter)),
                "cat": kind,
                "ph": "X",
                "pid": sharding.rank,
                "tid": tracks[kind][0],
                "ts": (start - begin) / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"bytes": size} if size else {},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


__all__ = [
    "Explanation",
    "StepTimes",
    "explain",
    "one_line",
    "predicted_exposed",
    "step_rows",
    "trace_events",
    "trace_path",
    "write_trace",
]
