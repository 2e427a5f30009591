"""What ``deepcompile.compile`` returns on one rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from deepcompile.planning.report import Explanation
from deepcompile.replay.compiled_graph import CompiledGraph
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.sharding.sharding import Sharding


class NoopReplay(CompiledGraph):
    """A compiled graph that does nothing. A single rank holds whole parameters, so there is nothing to gather or plan; the
    program runs unchanged.
    """

    def __init__(self, sharding: Sharding, ops: RecordedOps) -> None:
        self._sharding, self._seconds = sharding, ops.tail

    @contextlib.contextmanager
    def execute(self) -> Iterator[None]:
        yield

    predicted_step_time = on_demand_step_time = property(lambda self: self._seconds)
    divergences = property(lambda self: 0)
    variants = property(lambda self: 0)

    def rows(self) -> list[tuple[str, str]]:
        return [("replay", "one rank: it holds whole parameters, and nothing is gathered or planned")]

    def explain(self) -> Explanation:
        return Explanation(self.rows(), "")

    def one_line(self) -> str:
        return "deepcompile: one rank holds whole parameters; there is nothing to replay"

    def _refuse(self, path: str | os.PathLike[str]) -> None:
        raise RuntimeError("one rank gathers nothing: there is no plan to trace or save")

    trace = save = _refuse

    def activate(self) -> None:
        pass

    def deactivate(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def after_iteration(self) -> None:
        pass

    def add_variant(self, key: str, ops: RecordedOps) -> None:
        pass

    def explain_failure(self, error: Exception) -> None:
        pass
