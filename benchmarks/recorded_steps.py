"""What benchmarks ask of a rank about its communication, by the recorder. Runs in the rank's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepcompile.replay import recording
from deepcompile.replay.recorded_step import cycles_of

STEPS = 4
PAIRS = 6


def exposed(engine: Any, train: Callable[[], Any]) -> list[float]:
    """Seconds of each step that the program spent in communication: gathering, waiting, handing over gradients."""
    found = []
    for _ in range(STEPS):
        recording.start(engine.sharding)
        train()
        ops = recording.stop(engine.sharding, time.monotonic_ns())
        found.append(sum(cycle.spent for cycle in cycles_of(ops)))
    return found


def recording_pairs(engine: Any, train: Callable[[], Any]) -> list[tuple[float, float]]:
    """(recorded, not recorded) seconds of steps that follow each other, in either order."""
    found = []
    for pair in range(PAIRS):
        times = {}
        for recorded in (True, False) if pair % 2 else (False, True):
            if recorded:
                recording.start(engine.sharding)
            began = time.perf_counter()
            train()
            times[recorded] = time.perf_counter() - began
            if recorded:
                recording.stop(engine.sharding, time.monotonic_ns())
        found.append((times[True], times[False]))
    return found
