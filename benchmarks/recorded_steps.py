"""What benchmarks ask of a rank about its communication, by its trace. Runs in the rank's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepcompile.replay.recorded_step import cycles_of
from deepcompile.replay.recording import Recording

STEPS = 4
PAIRS = 6


def exposed(engine: Any, train: Callable[[], Any]) -> list[float]:
    """Seconds of each step that the program spent in communication: gathering, waiting, handing over gradients."""
    found = []
    for _ in range(STEPS):
        running = Recording(engine.sharding)
        train()
        ops = running.stop()
        found.append(sum(cycle.spent for cycle in cycles_of(ops)))
    return found


def recording_pairs(engine: Any, train: Callable[[], Any]) -> list[tuple[float, float]]:
    """(recorded, not recorded) seconds of steps that follow each other, in either order."""
    found = []
    for pair in range(PAIRS):
        times = {}
        for recorded in (True, False) if pair % 2 else (False, True):
            running = Recording(engine.sharding) if recorded else None
            began = time.perf_counter()
            train()
            times[recorded] = time.perf_counter() - began
            if running is not None:
                running.stop()
        found.append((times[True], times[False]))
    return found
