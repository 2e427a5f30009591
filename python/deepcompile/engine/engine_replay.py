"""``"compile": {"mode": "replay"}``: the engine records its first iterations, compiles them and replays, by itself."""

from __future__ import annotations

import logging

from deepcompile.replay import recording
from deepcompile.replay.compiled_graph import CompiledGraph
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.replay.replay import compile
from deepcompile.runtime.load import _C
from deepcompile.sharding.sharding import Sharding

_log = logging.getLogger("deepcompile")


class ReplayProfile:
    """Stands where :class:`deepcompile.planning.profile.Profile` does in other modes; the calls come from the engine. The
    first step warms up, the next ``iterations`` are recorded, then all ranks compile and every later step is replayed.
    """

    #: Whether the recorded steps run in compiled graphs.
    records_compiled = False

    def __init__(self, sharding: Sharding, iterations: int) -> None:
        self._sharding = sharding
        self._wanted = iterations
        self._steps = 0
        self._recordings: list[RecordedOps] = []
        self._recording: recording.Recording | None = None
        self._active = False
        self.graph: CompiledGraph | None = None
        self.done = False
        self.why_not = ""

    @property
    def iterations(self) -> int:
        return self._wanted

    def stop(self) -> None:
        """Stops recording and following. Called between steps, or after a forward without a backward."""
        self._drop_recording()
        if self._active:
            self._abandon()

    def _drop_recording(self) -> None:
        if self._recording is not None:
            self._recording.drop()
            self._recording = None

    def begin_step(self) -> None:
        self._drop_recording()  # of a step that failed
        if not self.done and self._steps > 0:  # in the first step ranks agree and buffers are made
            self._recording = recording.Recording(self._sharding, compiled=self.records_compiled)

    def start_forward(self) -> None:
        if self.graph is None or self._active:  # several forwards before one backward are one iteration, as recorded
            return
        self.graph.activate()
        self._active = True

    def end_forward(self) -> None:
        pass

    def start_backward(self) -> None:
        pass

    def end_update(self, started: int) -> None:
        pass

    def end_backward(self) -> None:
        if self._active:
            self._finish()

    def _finish(self) -> None:
        assert self.graph is not None
        try:
            _C.end_cycle(self._sharding.graph_id)
        finally:
            self._active = False
            self.graph.deactivate()
        self.graph.after_iteration()

    def _abandon(self) -> CompiledGraph:
        assert self.graph is not None
        self._active = False
        self.graph.abandon()
        return self.graph

    def failed(self, error: Exception) -> None:
        """The forward or the backward raised ``error``."""
        if self._active:
            graph = self._abandon()
            graph.explain_failure(error)

    def end_step(self) -> None:
        if self._recording is not None:
            self._recordings.append(self._recording.stop())
            self._recording = None
        self._steps += 1

    def ready(self) -> bool:
        """True once, on all ranks in the same step."""
        return not self.done and self._steps > self._wanted

    def plan(self) -> bool:
        """Every rank calls it at the same point. True when a plan is active from now on."""
        self.done = True
        ops = _joined(self._recordings)
        self._recordings.clear()
        try:
            self.graph = self._compile(ops)
        except RuntimeError as error:  # the same on all ranks; training goes on, gathering on demand
            self.why_not = str(error)
        return self.graph is not None

    def _compile(self, ops: RecordedOps) -> CompiledGraph:
        return compile(ops, memory_budget=self._sharding.config.memory_budget, model=self._sharding.model)

    def line(self, changed: bool) -> str:
        if self.graph is None:
            return f"deepcompile: nothing is replayed, parameters are gathered on demand: {self.why_not}"
        return self.graph.one_line()


def _joined(recordings: list[RecordedOps]) -> RecordedOps:
    """The recordings of several steps as one."""
    joined = RecordedOps(model=recordings[0].model, tail=min(ops.tail for ops in recordings))
    for ops in recordings:
        first, begin = joined.iterations, joined[-1].end if joined else 0
        joined.extend(
            op._replace(iteration=op.iteration + first, start=op.start + begin, end=op.end + begin) for op in ops
        )
    return joined
