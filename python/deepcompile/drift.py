"""Notices that steps have become longer or shorter than when they were planned, on all ranks together."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepcompile.sharding import Sharding


class Drift:
    """Adds up the time that the engine's calls take in a step. The median of the first ``steps`` steps after a plan is what
    later medians are compared with; what the program does between the calls is not counted.
    """

    def __init__(self, sharding: Sharding, factor: float, steps: int) -> None:
        self._sharding = sharding
        self._factor, self._steps = factor, steps
        self._seconds: list[float] = []
        self._sum = 0.0
        self._began = 0.0
        self._expected: float | None = None
        #: (expected, found) seconds of the steps for which plans were made again.
        self.history: list[tuple[float, float]] = []

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._sum += time.perf_counter() - self._began

    def forget(self) -> None:
        """After a new plan, only what comes counts."""
        self._seconds, self._sum, self._expected = [], 0.0, None

    def noticed(self) -> bool:
        """At the end of a step. True, on all ranks in the same step, when the steps no longer take what they took."""
        if not self._factor:
            return False
        self._seconds.append(self._sum)
        self._sum = 0.0
        if len(self._seconds) < self._steps:
            return False
        own = statistics.median(self._seconds)
        self._seconds = []
        found = self._sharding.planner.median_over_ranks(own, "compared its step times")
        if self._expected is None:
            self._expected = found
            return False
        if self._expected / self._factor <= found <= self._expected * self._factor:
            return False
        self.history.append((self._expected, found))
        self.forget()
        return True


__all__ = ["Drift"]
