"""The driver's side of a team: starts its ranks, tells all of them the same thing and waits for all answers."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RANK = str(Path(__file__).with_name("rank.py"))
START_TIMEOUT = 300  # a peer may compile its library first
ANSWER_TIMEOUT = 90
LEAD = 0.002  # seconds from the command to the common begin


class TeamFailed(RuntimeError):
    """A rank raised, died or did not answer. The team is gone."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    def __init__(self, team: str, world: int) -> None:
        self.team, self.world = team, world
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[Connection] = []
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        port = str(free_port())
        try:
            self._start(port)
        except FileNotFoundError as error:  # no such program
            raise self._failed(f"did not start: {error}") from error
        finally:
            # DeepSpeed leaves its segments behind; the port in the name tells that they are of this run.
            for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"):
                os.unlink(path)

    def _start(self, port: str) -> None:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(self.world),
            "LOCAL_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "OMP_NUM_THREADS": "1",
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # compilers look for ninja there
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/socket")
            server.listen(self.world)
            command = [sys.executable, RANK, self.team, f"{folder}/socket"]
            commands = [[*self._mpirun(), *command]] if self.team == "openmpi" else [command] * self.world
            for rank, command in enumerate(commands):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(
                    subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
                )
            self.ranks = self._accept(server)
        self._answers(START_TIMEOUT)

    def _accept(self, server: socket.socket) -> list[Connection]:
        server.settimeout(1)
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + START_TIMEOUT
        while len(found) < self.world:
            try:
                connection = Connection(server.accept()[0].detach())
                found[connection.recv()] = connection
            except TimeoutError:
                if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                    raise self._failed("died while starting") from None
        return [found[rank] for rank in range(self.world)]

    def _mpirun(self) -> list[str]:
        fits = self.world <= len(os.sched_getaffinity(0))
        binding = ["--bind-to", "core"] if fits else ["--bind-to", "none", "--oversubscribe"]
        return ["mpirun", "--allow-run-as-root", *binding, "-n", str(self.world)]

    def _answers(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        while len(values) < self.world:
            waiting = [connection for rank, connection in enumerate(self.ranks) if rank not in values]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(f"no answer within {timeout} s")
            for connection in ready:
                rank = self.ranks.index(connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    kind, value = "error", "died"
                if kind == "error":
                    raise self._failed(f"rank {rank}: {value}")
                values[rank] = value
        return [values[rank] for rank in range(self.world)]

    def _failed(self, reason: str) -> TeamFailed:
        self.close(patience=0)
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").strip().splitlines()
        return TeamFailed("\n    ".join([reason.strip(), *(said[-3:] if "died" in reason else [])]))

    def _ask(self, *command: Any) -> list[Any]:
        for connection in self.ranks:
            with contextlib.suppress(ConnectionError):  # the answer will tell
                connection.send(command)
        return self._answers(ANSWER_TIMEOUT)

    def prepare(self, cases: list[Any]) -> None:
        self._ask("prepare", [tuple(case) for case in cases])

    def measure(self, index: int, iterations: int) -> float:
        """Seconds of one iteration of the index-th case prepared, on the slowest rank."""
        return max(self._ask("measure", index, iterations, time.perf_counter() + LEAD))

    def close(self, patience: float = 5) -> None:
        for connection in self.ranks:
            connection.close()
        self.ranks = []
        for process in self.processes:
            for end in (None, process.terminate, process.kill):  # mpirun passes the first of them on
                if end is not None:
                    end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=patience if end is None else 5)
                    break
