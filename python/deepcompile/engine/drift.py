"""Notices that steps have become longer or shorter than when they were planned, on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch

from deepcompile.sharding.sharding import Sharding


class HostLap:
    """Host time from construction to ``end``."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class DeviceLap:
    """Device time of the current stream from construction to ``end``. The host only enqueues, so its clock says nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._began, self._ended = _timed(), _timed()
        self._began.record(self._stream)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._ended.record(self._stream)  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Blocks until the device has passed the end."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) * 1e-3


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Lap = HostLap | DeviceLap

#: Calls of one step that are added up, at most: a program may call the model often and never step.
_MOST_CALLS = 512
#: Steps that a device may lag behind the host. Times are read only so many steps later, so that the host does not block.
_BEHIND = 2


class Drift:
    """Adds up the time that the engine's calls take in a step; time between the calls is not counted. The median of
    ``steps`` steps after a plan, without the first step, is the reference; later medians are compared with it. After every
    drift the number of compared steps doubles, because planning again and again while times fluctuate gains nothing.
    """

    def __init__(self, sharding: Sharding, factor: float, steps: int) -> None:
        self._sharding = sharding
        self._factor, self._steps = factor, steps
        device = sharding.runtime.device
        self._device = device if device.type == "cuda" else None
        self._current: Lap | None = None
        self._laps: deque[Lap] = deque(maxlen=_MOST_CALLS)  # of this step
        self._window: list[list[Lap]] = []  # of the steps before it
        self._first = True
        self._expected: float | None = None
        #: (expected, measured) seconds of a step, for each drift that led to a new plan.
        self.history: list[tuple[float, float]] = []

    def start(self) -> None:
        if not self._factor:
            return
        if self._device is None:
            self._current = HostLap()
        elif not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._current = DeviceLap(self._device)  # (a CUDA graph capture runs nothing that could be timed)

    def stop(self) -> None:
        if self._current is not None:
            self._current.end()
            self._laps.append(self._current)
            self._current = None

    def leave_out(self) -> None:
        """Discards the times of the current step: it is not compared."""
        self._laps.clear()

    def forget(self) -> None:
        """After a new plan: earlier steps no longer count, nor does the first step to come, in which code is loaded."""
        self._laps.clear()
        self._window, self._first, self._expected = [], True, None

    def noticed(self) -> bool:
        """Called at the end of a step. True, on all ranks in the same step, if step times have drifted. A collective when
        enough steps have been collected.
        """
        laps = list(self._laps)
        self._laps.clear()
        if not laps:
            return False
        if self._first:
            self._first = False
            return False
        self._window.append(laps)
        if len(self._window) < self._steps + (0 if self._device is None else _BEHIND):
            return False
        compared, self._window = self._window[: self._steps], self._window[self._steps :]
        own = statistics.median(sum(lap.seconds() for lap in step) for step in compared)
        found = self._sharding.planner.median_over_ranks(own, "compared its step times")
        if self._expected is None:
            self._expected = found
            return False
        if self._expected / self._factor <= found <= self._expected * self._factor:
            return False
        self.history.append((self._expected, found))
        self.forget()
        self._steps *= 2
        return True
