"""A step that lies in several compiled graphs (graph breaks): recorded as it runs, planned as one, and followed.

A graph can start gathers of its own parameters only, so the first ones of every graph would be exposed. What starts
gathers ahead of recorded reads (:mod:`deepcompile.replay.compiled_graph`) does not ask whose they are: it follows the reads
of compiled code as well. What the graphs' own plans launch is then left out, and each read does what the plan of the whole
step has there. Equal layers may share code: the plan is one of reads, not of graphs.
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
    """Takes the place of :class:`deepcompile.planning.profile.Profile` when the first step was seen to lie in several
    graphs.
    """

    records_compiled = True

    def __init__(self, sharding: Sharding, iterations: int) -> None:
        super().__init__(sharding, iterations)
        self._steps = 1  # the first one, in which compilers ran
        self._taken = 0  # bytes of activations and of what one part needs beside them, at most in one micro-batch

    def end_step(self) -> None:
        if self._recording is not None:
            self._note_taken()
        super().end_step()

    def _note_taken(self) -> None:
        """A recording does not see activations; the graphs know what they save, and what their parts need meanwhile."""
        calls = self._sharding.calls or ()
        forwards = [call.step for call in calls if call.phase == FORWARD]
        every = sum(one.bytes for step in forwards for one in step.saved)
        micro_batches = self._sharding.config.gradient_accumulation_steps or 1
        parts = (segment for call in calls for segment in call.step.graphs[call.phase].segments)
        meanwhile = max((segment.workspace for segment in parts), default=0)
        self._taken = max(self._taken, every // micro_batches + meanwhile)

    def _compile(self, ops: RecordedOps) -> CompiledGraph:
        recording.require_whole_iterations(ops)
        budget = self._sharding.planner.budget  # 0: the least that is enough
        return plan_recorded(self._sharding, ops, budget and max(1, budget - self._taken), compiled=True)

    def line(self, changed: bool) -> str:
        if self.graph is None:
            return f"deepcompile: the step lies in several graphs, each planned alone: {self.why_not}"
        return self.graph.one_line()
