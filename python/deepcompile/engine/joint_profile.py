"""A step that lies in several compiled graphs (graph breaks): recorded as it runs, planned as one, and followed.

The schedule of one graph can start gathers of that graph's parameters only, so the first gathers of every graph would be
exposed. Instead the whole step is recorded and planned like an uncompiled one (:mod:`deepcompile.replay.compiled_graph`):
at each read, in compiled or eager code, the runtime follows the plan of the step, and the schedules of the single graphs are
ignored. The plan refers to reads, not to graphs, so equal layers may still share code.
"""

from __future__ import annotations

from deepcompile.compiler.segments import FORWARD
from deepcompile.engine.engine_replay import ReplayProfile
from deepcompile.replay import recording
from deepcompile.replay.compiled_graph import CompiledGraph
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.replay.replay import plan_recorded
from deepcompile.sharding.sharding import Sharding


class JointProfile(ReplayProfile):
    """Replaces :class:`deepcompile.planning.profile.Profile` if the first step ran in several compiled graphs."""

    records_compiled = True

    def __init__(self, sharding: Sharding, iterations: int) -> None:
        super().__init__(sharding, iterations)
        self._steps = 1  # the first one, in which compilers ran
        self._activation_bytes = 0  # most in one micro-batch: saved activations, and the largest segment's workspace

    def end_step(self) -> None:
        if self._recording is not None:
            self._note_activation_bytes()
        super().end_step()

    def _note_activation_bytes(self) -> None:
        """A recording has no activations. The graphs know what they save, and the workspace of their segments."""
        calls = self._sharding.calls or ()
        forwards = [call.step for call in calls if call.phase == FORWARD]
        saved = sum(one.bytes for step in forwards for one in step.saved)
        micro_batches = self._sharding.config.gradient_accumulation_steps or 1
        segments = (segment for call in calls for segment in call.step.graphs[call.phase].segments)
        workspace = max((segment.workspace for segment in segments), default=0)
        self._activation_bytes = max(self._activation_bytes, saved // micro_batches + workspace)

    def _compile(self, ops: RecordedOps) -> CompiledGraph:
        recording.require_whole_iterations(ops)
        budget = self._sharding.planner.budget  # 0: the least that is enough
        rest = budget and max(1, budget - self._activation_bytes)
        return plan_recorded(self._sharding, ops, rest, compiled=True)

    def line(self, changed: bool) -> str:
        if self.graph is None:
            return f"deepcompile: the step lies in several graphs, each planned alone: {self.why_not}"
        return self.graph.one_line()
