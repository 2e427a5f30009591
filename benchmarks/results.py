#!/usr/bin/env python3
"""Stored results: the form of ``benchmarks/results/*.json``, and the page ``docs/results.md`` that is made from these files.

Run it after a file was added or changed; ``--check`` writes nothing and fails when the page is not what the files give. A
benchmark writes such a file with ``--json FILE`` (``report.py``). Needs neither torch nor deepcompile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().with_name("results")
PAGE = FOLDER.parent.parent / "docs" / "results.md"


@dataclass(frozen=True)
class Row:
    """One figure of deepcompile, beside a peer's where there is one.

    ``better`` is ``lower`` or ``higher``. ``ratio`` says how many times as good as the peer deepcompile is: above 1
    deepcompile is better. ``bar`` is the limit that was set for what ``bar_on`` names: the value (at most, or at least where
    higher is better) or the ratio (at least). ``met`` is whether it was reached.
    """

    name: str
    value: float
    unit: str
    better: str
    peer: str | None
    peer_value: float | None
    ratio: float | None
    bar: float | None
    bar_on: str | None
    met: bool | None

    def reaches_bar(self) -> bool | None:
        """None without a bar."""
        if self.bar is None:
            return None
        if self.bar_on == "ratio":
            return self.ratio is not None and self.ratio >= self.bar
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar

    def bar_text(self) -> str:
        if self.bar is None:
            return ""
        limit = number(self.bar)
        if self.bar_on == "ratio":
            return f"ratio at least {limit}"
        return f"at most {limit}" if self.better == "lower" else f"at least {limit}"


@dataclass(frozen=True)
class Result:
    """What one run of a benchmark gave. ``machine`` is in words; ``command`` is what was run, from the repository's root."""

    title: str
    machine: str
    date: str
    commit: str
    torch: str
    command: str
    source: str  # "measured", or where the figures stood before somebody entered them by hand
    conditions: str
    not_measured: list[str]  # peers and bars that the command measures and this run could not
    rows: list[Row]


class BadResult(ValueError):
    """A stored file that is not of the form above."""


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def _fields(kind: type, found: dict[str, Any], where: str) -> dict[str, Any]:
    expected = {field.name for field in dataclasses.fields(kind)}
    if missing := expected - found.keys():
        raise BadResult(f"{where}: {', '.join(sorted(missing))} missing")
    if unknown := found.keys() - expected:
        raise BadResult(f"{where}: {', '.join(sorted(unknown))} unknown")
    return found


def row_of(found: dict[str, Any], where: str) -> Row:
    row = Row(**_fields(Row, found, where))
    where = f"{where} ({row.name})"
    if not row.name or not isinstance(row.value, int | float):
        raise BadResult(f"{where}: a row has a name and a number")
    if row.better not in ("lower", "higher"):
        raise BadResult(f"{where}: better is {row.better!r}, neither lower nor higher")
    if row.peer is None and (row.peer_value is not None or row.ratio is not None):
        raise BadResult(f"{where}: a peer's value without the peer's name")
    if (row.bar is None) != (row.bar_on is None) or row.bar_on not in (None, "value", "ratio"):
        raise BadResult(f"{where}: bar is {row.bar!r}, bar_on {row.bar_on!r}")
    if row.met is not row.reaches_bar():
        raise BadResult(f"{where}: met is {row.met}, but by its figures it is {row.reaches_bar()}")
    return row


def load(path: Path) -> Result:
    found = _fields(Result, json.loads(path.read_text()), path.name)
    for key in ("title", "machine", "date", "commit", "torch", "command", "source"):
        if not isinstance(found[key], str) or not found[key]:
            raise BadResult(f"{path.name}: {key} is empty")
    if not found["rows"]:
        raise BadResult(f"{path.name}: no rows")
    rows = [row_of(row, f"{path.name}, row {index}") for index, row in enumerate(found["rows"], 1)]
    twice = [key for key, count in Counter((row.name, row.peer) for row in rows).items() if count > 1]
    if twice:
        raise BadResult(f"{path.name}: {twice[0]} stands there more than once")
    return Result(**{**found, "rows": rows})


def store(result: Result, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(result), indent=1, ensure_ascii=False) + "\n")


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _section(result: Result) -> list[str]:
    lines = [f"## {result.title}", ""]
    machine = result.machine[0].upper() + result.machine[1:]
    origin = f"{result.date}, commit {result.commit}"
    lines.append(f"{machine}; PyTorch {result.torch}; {origin}; `{result.command}`.")
    if result.conditions:
        lines.append(result.conditions)
    if result.source != "measured":
        lines.append(f"{result.source[0].upper() + result.source[1:]}.")
    lines += [
        "",
        _cells("", "value", "better", "peer", "peer's value", "ratio", "bar"),
        "|---|--:|---|---|--:|--:|---|",
    ]
    for row in result.rows:
        peer_value = "" if row.peer_value is None else f"{number(row.peer_value)} {row.unit}"
        ratio = "" if row.ratio is None else number(row.ratio)
        bar = "" if row.met is None else f"{row.bar_text()}: {'met' if row.met else '**missed**'}"
        value = f"{number(row.value)} {row.unit}"
        lines.append(_cells(row.name, value, row.better, row.peer or "", peer_value, ratio, bar))
    if result.not_measured:
        lines += ["", f"Not measured in this run: {'; '.join(result.not_measured)}."]
    return [*lines, ""]


def page(results: list[Result]) -> str:
    lines = [
        "# Results",
        "",
        "Made by `python benchmarks/results.py` from `benchmarks/results/*.json`; do not edit this page. A *ratio* says how",
        "many times as good as the peer deepcompile is (above 1: better), a *bar* is the limit that was set beforehand.",
        "Sections come from different runs, machines and versions, so their figures do not compare with one another. Where",
        "figures were entered by hand, date and commit are those of the change that brought them into the documentation.",
        "",
        "## Missed bars",
        "",
    ]
    missed = [(result, row) for result in results for row in result.rows if row.met is False]
    if missed:
        lines += [_cells("", "found", "bar", "of"), "|---|--:|---|---|"]
        for result, row in missed:
            ratio = row.ratio if row.bar_on == "ratio" and row.ratio is not None else None
            value = f"{number(row.value)} {row.unit}" if ratio is None else f"ratio {number(ratio)}"
            lines.append(_cells(row.name, value, row.bar_text(), f"{result.title} ({result.date})"))
    else:
        lines.append("None.")
    lines.append("")
    for result in results:
        lines += _section(result)
    return "\n".join(lines).rstrip() + "\n"


def stored(folder: Path = FOLDER) -> list[Result]:
    return [load(path) for path in sorted(folder.glob("*.json"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when the page is out of date"
    )
    options = parser.parse_args()
    text = page(stored())
    if options.check:
        if PAGE.read_text() != text:
            print("docs/results.md is out of date: run python benchmarks/results.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
