"""Collectives of ranks on one host: deepcompile's shared memory beside gloo, DeepSpeed's shared-memory all-reduce, Open MPI
and a memcpy of the same bytes by all ranks at once. One thread a rank, each on a core of its own while there are enough.

All candidates are started first and measured in turn, round after round over all rows; the idle ones sleep. A time is the
median over the rounds of the slowest rank's time, a ratio the median over the rounds of the ratio of that round: what cores
need to pass a cache line to each other changes threefold on a virtual machine, from one second to another. All tensors are
made anew for every round: which physical pages a tensor of half the last cache gets is worth a quarter of its time.
``bytes`` is what an all-reduce reduces, an all-gather yields, a reduce-scatter takes.

The operator, DeepSpeed's and ours, is called as ``torch.ops.deepspeed.inference_all_reduce_.default``; gloo is compared
with our c10d backend, called in the same way, and Open MPI's call with ``deepcompile.comm.inference_all_reduce``. The no-op
is ``torch.ops.aten.resolve_conj.default`` of a real tensor.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from collectives.launch import Ranks, TeamFailed
from collectives.teams import Case
from report import Report, parser_of
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
DTYPES = ("float32", "bfloat16")
PEERS = ("gloo", "deepspeed", "openmpi")


class Candidate(NamedTuple):
    """A column. ``against`` is the column of ours that it is compared with."""

    team: str
    interface: str
    memory: str = "ordinary"
    against: str | None = None

    def __str__(self) -> str:
        if self.team == "bounds":
            return self.interface
        if self.team != "deepcompile":
            return self.team
        interface = "" if self.interface == "operator" else self.interface
        words = ["ours", interface, "shared" if self.memory == "shared" else ""]
        return " ".join(filter(None, words))

    def measures(self, collective: str, dtype: str, size: int) -> bool:
        if self.interface == "no-op":
            return collective == "all-reduce" and size == SIZES[0]
        return self.team != "openmpi" or dtype == "float32"


CALL = Candidate("deepcompile", "call")
OPERATOR, SHARED = Candidate("deepcompile", "operator"), Candidate("deepcompile", "operator", "shared")
C10D, C10D_SHARED = Candidate("deepcompile", "c10d"), Candidate("deepcompile", "c10d", "shared")
GLOO = Candidate("gloo", "c10d", against=str(C10D))
COLLECTIVES: dict[str, list[Candidate]] = {
    "all-reduce": [
        *(OPERATOR, CALL, SHARED, C10D),
        Candidate("deepspeed", "operator", against=str(OPERATOR)),
        Candidate("openmpi", "mpi", against=str(CALL)),
        GLOO,
        Candidate("bounds", "memcpy", against=str(OPERATOR)),
        Candidate("bounds", "no-op"),
    ],
    "all-gather": [C10D, C10D_SHARED, GLOO, Candidate("bounds", "memcpy", against=str(C10D))],
    "reduce-scatter": [C10D, C10D_SHARED, GLOO, Candidate("bounds", "memcpy", against=str(C10D))],
}
Key = tuple[str, str, int, str]  # collective, dtype, bytes, column


class Row(NamedTuple):
    collective: str
    dtype: str
    size: int


class Results:
    """Microseconds of every round."""

    def __init__(self) -> None:
        self.samples: dict[Key, list[float]] = {}

    def time(self, collective: str, dtype: str, size: int, column: object) -> float | None:
        found = self.samples.get((collective, dtype, size, str(column)))
        return None if found is None else statistics.median(found)

    def ratio(self, collective: str, dtype: str, size: int, peer: object, ours: object) -> float | None:
        pair = [self.samples.get((collective, dtype, size, str(column))) for column in (peer, ours)]
        if pair[0] is None or pair[1] is None:
            return None
        return statistics.median(theirs / own for theirs, own in zip(*pair, strict=False))


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


class Run:
    """The teams that could be started, and what was measured."""

    def __init__(self, world: int, teams: list[str], rounds: int, slice_seconds: float) -> None:
        self.rounds, self.slice = rounds, slice_seconds
        self.results = Results()
        self.failures: dict[str, str] = {}
        self.teams: dict[str, Ranks] = {}
        for team in teams:
            try:
                self.teams[team] = Ranks(team, world)
            except TeamFailed as error:
                self._drop(team, str(error))

    def _drop(self, team: str, reason: str) -> None:
        self.teams.pop(team, None)
        self.failures[team] = reason
        print(f"*** {team} IS NOT MEASURED: {reason}", file=sys.stderr, flush=True)

    def _guarded(self, team: str, action: Callable[[Ranks], float | None]) -> float | None:
        if team not in self.teams:
            return None
        try:
            return action(self.teams[team])
        except TeamFailed as error:
            self._drop(team, str(error))
            return None

    def measure(self, rows: list[Row]) -> None:
        """Round after round, and in a round one row after the other: what slows the machine down for some seconds meets a
        round or two of many rows, not all rounds of one."""
        iterations: dict[tuple[Row, Candidate], int] = {}
        samples: dict[tuple[Row, Candidate], list[float]] = {}
        for turn in range(self.rounds):
            for row in rows:
                index = self._prepare(row)
                for column in index:
                    self._once(column, index, 2)
                    if turn == 0 and (first := self._once(column, index, 3)) is not None:
                        iterations[row, column] = max(2, min(10_000, int(self.slice / first)))
                order = [column for column in index if (row, column) in iterations]
                shift = turn % len(order) if order else 0
                for column in order[shift:] + order[:shift]:
                    if (seconds := self._once(column, index, iterations[row, column])) is not None:
                        samples.setdefault((row, column), []).append(seconds * 1e6)
        for (row, column), found in samples.items():
            if len(found) > self.rounds // 2:  # a team that failed later has no more
                self.results.samples[*row, str(column)] = found

    def _prepare(self, row: Row) -> dict[Candidate, int]:
        """Makes all tensors of the row anew. Where in its team's list each column is."""
        columns = [column for column in COLLECTIVES[row.collective] if column.measures(*row)]
        index: dict[Candidate, int] = {}
        for team in list(self.teams):
            own = [column for column in columns if column.team == team]
            index.update({column: position for position, column in enumerate(own)})
            cases = [Case(row.collective, column.interface, column.memory, row.dtype, row.size) for column in own]
            self._guarded(team, lambda ranks, cases=cases: ranks.prepare(cases))
        return {column: index[column] for column in columns if column.team in self.teams}

    def _once(self, column: Candidate, index: dict[Candidate, int], iterations: int) -> float | None:
        return self._guarded(column.team, lambda ranks: ranks.measure(index[column], iterations))

    def close(self) -> None:
        for ranks in self.teams.values():
            ranks.close()


def table(results: Results, collective: str) -> Table:
    columns = COLLECTIVES[collective]
    title = f"{collective}: microseconds, in brackets the ratio to ours, of gloo to ours c10d, of Open MPI to ours call"
    made = Table(title=title, padding=0)
    made.add_column("bytes")
    made.add_column("dtype")
    for column in columns:
        made.add_column(str(column), justify="right")
    for dtype in DTYPES:
        for size in SIZES:
            cells = []
            for column in columns:
                took = results.time(collective, dtype, size, column)
                ratio = results.ratio(collective, dtype, size, column, column.against)
                text = "" if took is None else f"{took:.0f}" if took >= 1000 else f"{took:.{1 if took >= 10 else 2}f}"
                cells.append(text if ratio is None else f"{text} ({ratio:.2f})")
            if any(cells):
                made.add_row(size_name(size), dtype, *cells)
    return made


def geometric_mean(ratios: dict[int, float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, ratios.values()))) if ratios else None


class Bars:
    """The bars, each over all cells that it speaks of; the worst of them is said."""

    def __init__(self, results: Results, report: Report) -> None:
        self.results, self.report = results, report
        self.lines: list[str] = []

    def say(self, what: str, value: float | None, bar: float, where: str = "is", lower: bool = False) -> None:
        """``value`` is a number of times, of which ``bar`` are wanted, or with ``lower`` microseconds, so many at most."""
        if value is None:
            self.lines.append(f"  -   {what}: not measured")
            return
        unit, better = ("us", "lower") if lower else ("times", "higher")
        name = what if where == "is" else f"{what}, worst at {where}"
        if self.report.add(name, value, unit, better=better, bar=bar).met:
            self.lines.append(f"pass  {what}: {where} {value:.2f}")

    def ratios(self, collective: str, dtype: str, peer: str, ours: Candidate) -> dict[int, float]:
        found = {size: self.results.ratio(collective, dtype, size, peer, ours) for size in SIZES}
        return {size: ratio for size, ratio in found.items() if ratio is not None}

    def each(self, what: str, ratios: dict[int, float], wanted: Callable[[int], float]) -> None:
        for bar in sorted({wanted(size) for size in SIZES}):
            sizes = [size for size in SIZES if wanted(size) == bar]
            worst = min(sizes, key=lambda size: ratios.get(size, 0.0))
            names = ", ".join(map(size_name, sizes))
            self.say(
                f"{what}, {bar} times at {names}",
                ratios.get(worst),
                bar,
                size_name(worst),
            )

    def judge(self) -> None:
        for dtype in DTYPES:
            ordinary = self.ratios("all-reduce", dtype, "deepspeed", OPERATOR)
            self.each(
                f"DeepSpeed, all-reduce {dtype}",
                ordinary,
                lambda size: 2.5 if size >= 16 * MIB else 1.3 if size == 64 * KIB else 1.5,
            )
            mean = geometric_mean(ordinary)
            self.say(f"DeepSpeed, all-reduce {dtype}, 2.2 times in the geometric mean", mean, 2.2)
            shared = geometric_mean(self.ratios("all-reduce", dtype, "deepspeed", SHARED))
            what = f"DeepSpeed, all-reduce {dtype}, geometric mean in shared memory, more than for ordinary tensors"
            self.say(what, shared, mean or 0)
            if dtype == "float32":
                openmpi = self.ratios("all-reduce", dtype, "openmpi", CALL)
                self.each("Open MPI, all-reduce float32", openmpi, lambda size: 1.5)
                through_ops = self.ratios("all-reduce", dtype, "openmpi", OPERATOR)
                if SIZES[0] in through_ops:
                    self.lines.append(f"      Open MPI, 1 KiB against torch.ops: {through_ops[SIZES[0]]:.2f}")
            for collective in COLLECTIVES:
                gloo = self.ratios(collective, dtype, "gloo", C10D)
                self.each(f"gloo, {collective} {dtype}", gloo, lambda size: 10 if size <= MIB else 4)
            largest, smallest = SIZES[-1], ("all-reduce", dtype, SIZES[0])
            memcpy = self.ratios("all-reduce", dtype, "memcpy", OPERATOR).get(largest)
            self.say(f"memcpy, all-reduce {dtype}, once at {size_name(largest)}", memcpy, 1)
            ours, floor = self.results.time(*smallest, OPERATOR), self.results.time(*smallest, "no-op")
            above = None if ours is None or floor is None else ours - floor
            self.say(f"1 KiB {dtype} in place, microseconds above a no-op operator, 1", above, 1, lower=True)


def fill(report: Report, results: Results) -> None:
    """A row for each pair, and for each time that has nothing to be compared with."""
    for collective, dtype, size, name in results.samples:
        column = next(column for column in COLLECTIVES[collective] if str(column) == name)
        cell = (collective, dtype, size)
        case = f"{collective} {dtype} {size_name(size)}"
        took, ours = results.time(*cell, column), results.time(*cell, column.against)
        if ours is not None:
            ratio = results.ratio(*cell, column, column.against)
            report.add(f"{case}, {column.against}", ours, "us", name, took, ratio)
        elif took is not None:
            report.add(f"{case}, {name}", took, "us")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="the bars hold for 2, the default")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="LIST", help="of %(default)s")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each measurement, in place of the usual number")
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    begin = time.monotonic()
    rounds, slice_seconds = (5, 0.005) if options.quick else (21, 0.02)
    rounds = options.rounds or rounds
    run = Run(options.ranks, ["deepcompile", *peers, "bounds"], rounds, slice_seconds)
    try:
        run.measure([Row(*cell) for cell in itertools.product(COLLECTIVES, DTYPES, SIZES)])
    finally:
        run.close()
    report = Report(f"Shared-memory collectives, {options.ranks} ranks on {len(os.sched_getaffinity(0))} cores")
    report.missing_peers = [team for team in run.failures if team in PEERS]
    for team in run.failures.keys() - set(PEERS):
        report.bar_not_measured(f"{team} runs")
    fill(report, run.results)
    bars = Bars(run.results, report)
    if options.ranks == 2:
        bars.judge()
    status = report.finish(options, [table(run.results, collective) for collective in COLLECTIVES])
    print("\n".join(bars.lines or ["Bars are for 2 ranks."]))
    for team, reason in run.failures.items():
        print(f"*** {team} WAS NOT MEASURED: {reason}")
    print(f"{time.monotonic() - begin:.0f} s, median of {rounds} rounds")
    return status


if __name__ == "__main__":
    sys.exit(main())
