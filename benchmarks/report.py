"""The one form of all benchmarks: ``benchmarks/NAME.py [--quick] [--json FILE]``, a table on the screen, a stored result
(``results.py``) in the file.

A row compares deepcompile with a peer on the same work in the same run; a ratio above 1 means that deepcompile is better.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import Result, Row, store
from rich.console import Console
from rich.table import Table

#: Options that say where the rows go, and nothing of what is measured.
OUTPUT_OPTIONS = ("--json", "--machine")


class Report:
    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self.bars_not_measured: list[str] = []
        self.missing_peers: list[str] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        peer: str | None = None,
        peer_value: float | None = None,
        ratio: float | None = None,
        *,
        better: str = "lower",
        bar: float | None = None,
        ratio_bar: float | None = None,
    ) -> Row:
        """``ratio`` is computed where it is not given. ``bar`` limits the value, ``ratio_bar`` is the least ratio."""
        assert bar is None or ratio_bar is None, "a row has one bar"
        if ratio is None and peer_value is not None and value and peer_value:
            ratio = peer_value / value if better == "lower" else value / peer_value
        limit = bar if ratio_bar is None else ratio_bar
        bar_on = None if limit is None else "value" if ratio_bar is None else "ratio"
        row = Row(name, value, unit, better, peer, peer_value, ratio, limit, bar_on, None)
        row = Row(**{**vars(row), "met": row.reaches_bar()})
        self.rows.append(row)
        return row

    def bar_not_measured(self, what: str) -> None:
        """A bar whose figures this run should have measured and could not: counts as missed."""
        self.bars_not_measured.append(what)

    def finish(self, options: argparse.Namespace, tables: list[Table] | None = None) -> int:
        """Prints (``tables``, if given, in place of the rows), writes, and returns the exit status: 1 when a bar was missed,
        2 when a peer was missing.
        """
        for table in [self._table()] if tables is None else tables:
            Console(width=130).print(table)
        missed = [row for row in self.rows if row.met is False]
        for row in missed:
            found = f"ratio {row.ratio or 0:.3f}" if row.bar_on == "ratio" else f"{row.value:.3f} {row.unit}"
            beside = f" against {row.peer}" if row.peer else ""
            print(f"BAR MISSED: {row.name}{beside}: {found}, {row.bar_text()}")
        for what in self.bars_not_measured:
            print(f"BAR MISSED: {what}: not measured")
        for peer in self.missing_peers:
            print(f"PEER MISSING: {peer} (make peers installs it)")
        if options.json is not None:
            store(self._result(options.machine or machine()), Path(options.json))
        return 1 if missed or self.bars_not_measured else 2 if self.missing_peers else 0

    def _result(self, machine: str) -> Result:
        return Result(
            title=self.title,
            machine=machine,
            date=datetime.date.today().isoformat(),
            commit=commit(),
            torch=torch.__version__,
            command=command(),
            source="measured",
            conditions=f"Python {sys.version.split()[0]}.",
            not_measured=[*self.missing_peers, *self.bars_not_measured],
            rows=self.rows,
        )

    def _table(self) -> Table:
        table = Table(title=self.title)
        for column in ("case", "deepcompile", "unit", "peer", "peer's", "ratio", "bar"):
            table.add_column(column, justify="right" if column in ("deepcompile", "peer's", "ratio") else "left")
        for row in self.rows:
            peer_value = "" if row.peer_value is None else f"{row.peer_value:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            table.add_row(row.name, f"{row.value:.2f}", row.unit, row.peer or "", peer_value, ratio, row.bar_text())
        return table


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write a stored result there (benchmarks/results.py)")
    parser.add_argument("--machine", metavar="WORDS", help="what the stored result says of the machine")
    return parser


def arguments(description: str, device: bool = False) -> argparse.Namespace:
    """``device``: the benchmark also runs on CUDA."""
    parser = parser_of(description)
    if device:
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are")
        parser.add_argument("--ranks", type=int, choices=[1, 2], help="on cuda: only with so many ranks")
        parser.add_argument("--batch", choices=("small", "large"), help="on cuda: only this batch")
        parser.add_argument("--without", default="", metavar="WORD", help="on cuda: not the systems that are called so")
    return parser.parse_args()


def machine() -> str:
    """In words that name no host: "one NVIDIA H200, 16 cores of an AMD EPYC 9474F"."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    cores = f"{len(os.sched_getaffinity(0))} cores" + (f" of {models[0]}" if models else "")
    if not torch.cuda.is_available():
        return cores
    count = torch.cuda.device_count()
    return f"{'one' if count == 1 else count} {torch.cuda.get_device_name(0)}, {cores}"


def command() -> str:
    """What was run, with the settings of deepcompile and NCCL that the environment held and no path of this machine."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if not skip and not word.startswith(tuple(f"{option}=" for option in OUTPUT_OPTIONS)):
            skip = word in OUTPUT_OPTIONS
            words += [] if skip else [word]
        else:
            skip = False
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("DEEPCOMPILE_", "NCCL_")) and "/" not in value
    ]
    return " ".join([*settings, "python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def commit() -> str:
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return "unknown" if not name else f"{name} and changes" if git("status", "--porcelain", "-uno") else name


def interleaved(
    functions: dict[str, Callable[[], None]], rounds: int, settle: Callable[[], None] | None = None
) -> dict[str, float]:
    """Median seconds of each function, called in turn so that all see the same state of the machine. ``settle`` is called
    after each, and not timed: it waits for what runs on behind the host.
    """
    for function in functions.values():
        function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, function in functions.items():
                begin = time.perf_counter()
                function()
                samples[name].append(time.perf_counter() - begin)
                if settle is not None:
                    settle()
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}
