"""Notices that steps have become longer or shorter than when they were planned, on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepcompile.sharding import Sharding


class HostLap:
    """From its making to ``end``, by the host's clock."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def known(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._ended - self._began


class DeviceLap:
    """The same by the device's, on the current stream: the host only enqueues, and how long that takes says nothing."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._began.record()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._ended.record()  # type: ignore[no-untyped-call]

    def known(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Waits where it is not known yet."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) * 1e-3


Lap = HostLap | DeviceLap


def device_lap() -> DeviceLap | None:
    """None in a capture: what is captured runs later, and often."""
    return None if torch.cuda.is_current_stream_capturing() else DeviceLap()  # type: ignore[no-untyped-call]


class Drift:
    """Adds up the time that the engine's calls take in a step. The median of the first ``steps`` steps after a plan is what
    later medians are compared with; what the program does between the calls is not counted.
    """

    def __init__(self, sharding: Sharding, factor: float, steps: int) -> None:
        self._sharding = sharding
        self._factor, self._steps = factor, steps
        self._lap: Callable[[], Lap | None] = device_lap if sharding.runtime.device.type == "cuda" else HostLap
        self._current: Lap | None = None
        self._laps: list[Lap] = []  # of this step
        self._window: list[list[Lap]] = []  # of the steps before it
        self._expected: float | None = None
        #: (expected, found) seconds of the steps for which plans were made again.
        self.history: list[tuple[float, float]] = []

    def start(self) -> None:
        if self._factor:
            self._current = self._lap()

    def stop(self) -> None:
        if self._current is not None:
            self._current.end()
            self._laps.append(self._current)
            self._current = None

    def leave_out(self) -> None:
        """At the end of a step that is not compared."""
        self._laps = []

    def forget(self) -> None:
        """After a new plan, only what comes counts."""
        self._laps, self._window, self._expected = [], [], None

    def noticed(self) -> bool:
        """At the end of a step. True, on all ranks in the same step, when the steps no longer take what they took."""
        if not self._laps:
            return False
        self._window.append(self._laps)
        self._laps = []
        if len(self._window) < self._steps:
            return False
        window, self._window = self._window, []
        # A device may not have come to the last steps yet, which is no reason to wait for it.
        known = [step for step in window if all(lap.known() for lap in step)] or window[:1]
        own = statistics.median(sum(lap.seconds() for lap in step) for step in known)
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
