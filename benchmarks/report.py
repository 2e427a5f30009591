"""The one form of all benchmarks: ``benchmarks/NAME.py [--quick] [--json FILE]``, a table on the screen, rows in the file.

A row compares deepcompile with a peer on the same work in the same run; a ratio above 1 means that deepcompile is better.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table


@dataclass
class Row:
    case: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None


class Report:
    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self.misses: list[str] = []  # bars that were not reached
        self.missing_peers: list[str] = []

    def add(
        self, case: str, value: float, unit: str, peer: str, peer_value: float | None, ratio: float | None = None
    ) -> None:
        """By default lower is better, so the ratio is the peer's value over ours."""
        if ratio is None and peer_value is not None:
            ratio = peer_value / value
        self.rows.append(Row(case, value, unit, peer, peer_value, ratio))

    def bar(self, description: str, reached: bool) -> None:
        if not reached:
            self.misses.append(description)

    def finish(self, json_path: str | None, tables: list[Table] | None = None) -> int:
        """Prints (``tables``, if given, in place of the rows), writes, and returns the exit status: 1 when a bar was missed,
        2 when a peer was missing.
        """
        for table in [self._table()] if tables is None else tables:
            Console(width=130).print(table)
        for miss in self.misses:
            print(f"BAR MISSED: {miss}")
        for peer in self.missing_peers:
            print(f"PEER MISSING: {peer} (make peers installs it)")
        if json_path is not None:
            with open(json_path, "w") as file:
                json.dump({"machine": machine(), "rows": [asdict(row) for row in self.rows]}, file, indent=2)
        return 1 if self.misses else 2 if self.missing_peers else 0

    def _table(self) -> Table:
        table = Table(title=self.title)
        for column in ("case", "deepcompile", "unit", "peer", "peer's", "ratio"):
            table.add_column(column, justify="left" if column in ("case", "unit", "peer") else "right")
        for row in self.rows:
            peer_value = "" if row.peer_value is None else f"{row.peer_value:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            table.add_row(row.case, f"{row.value:.2f}", row.unit, row.peer, peer_value, ratio)
        return table


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
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


def machine() -> dict[str, object]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


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
