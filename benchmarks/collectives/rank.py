"""One rank of a team: ``rank.py TEAM SOCKET``, started by launch.py. It obeys what comes through the socket, and sleeps in a
read of it, using no core, while the other teams are measured.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from itertools import repeat
from multiprocessing.connection import Client

import torch
from teams import TEAMS, Call, Case, check


def measure(call: Call, iterations: int, begin_at: float) -> float:
    """Seconds of one iteration. All ranks begin at the same time, and the untimed calls align them."""
    while time.perf_counter() < begin_at:
        pass
    for _ in repeat(None, 1 + iterations // 10):
        call.run()
    begin = time.perf_counter()
    for _ in repeat(None, iterations):
        call.run()
    return (time.perf_counter() - begin) / iterations


def main() -> None:
    name, address = sys.argv[1:]
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    calls: list[Call] = []
    with Client(address, family="AF_UNIX") as driver:
        driver.send(rank)
        try:
            team = TEAMS[name](rank, world)
            # Only this thread: a peer's helper threads may run where they like.
            cores = sorted(os.sched_getaffinity(0))
            if world <= len(cores):
                os.sched_setaffinity(0, {cores[rank]})
            driver.send(("ok", None))
        except Exception as error:
            driver.send(("error", f"{type(error).__name__}: {error}"))
            return
        while True:
            try:
                command, *arguments = driver.recv()
            except EOFError:
                break
            try:
                value = None
                if command == "prepare":
                    calls.clear()
                    for case in map(Case._make, arguments[0]):
                        calls.append(team.call(case))
                        check(case, calls[-1], rank, world)
                elif command == "measure":
                    index, iterations, begin_at = arguments
                    value = measure(calls[index], iterations, begin_at)
                driver.send(("ok", value))
            except Exception:
                driver.send(("error", traceback.format_exc(limit=-3)))
    os._exit(0) if name != "openmpi" else None  # no shutdown of groups whose other ranks may be gone


if __name__ == "__main__":
    main()
