"""Reads the runtime's log of steps (src/runtime/step_trace.h), for measurements, recordings and trace files."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["read", "group", "release", "gradient", "end_backward", "begin_graph", "gather", "reduction"]


class TraceEntry(NamedTuple):
    """``gather`` and ``reduction`` ran on the channels, the others are events of the program. Times are nanoseconds of the
    steady clock.
    """

    kind: Kind
    id: int  # of the parameter, or of the first of several; -1 for events without a parameter
    dtype: torch.dtype
    bytes: int  # of whole parameters or gradients
    backward: bool
    gathers: bool  # a read that found no copy
    iteration: int
    micro: int  # micro-batch
    start: int
    launched: int  # of a read: when its gather was started, or its copy found; -1 for others
    end: int


class Trace(NamedTuple):
    entries: list[TraceEntry]
    began: int
    ended: int
    compiled_code: bool  # whether compiled code handed over gradients


class TraceReader:
    """Reads what ``runtime`` logs from construction until :meth:`stop` or :meth:`drop`."""

    def __init__(self, runtime: Any, *, releases: bool = False) -> None:
        """``releases``: log releases of copies, too; then read-in-place copies are not kept for reuse."""
        self._trace = runtime.trace
        self.began = time.monotonic_ns()
        self._reader: int | None = self._trace.start(releases)

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None:
            self.drop()

    def stop(self) -> Trace:
        """Returns what was logged. Waits for a device."""
        assert self._reader is not None
        reader, self._reader = self._reader, None
        entries, ended, compiled_code = self._trace.stop(reader)
        return Trace([TraceEntry(*entry) for entry in entries], self.began, ended, compiled_code)

    def drop(self) -> None:
        """Ends reading. Does not wait for a device; does nothing the second time."""
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._trace.drop(reader)


#: Tracks of a trace file, by the kind of their entries.
_TRACKS: dict[str, tuple[int, str]] = {
    "read": (0, "program: waits for parameters"),
    "gradient": (1, "program: gives gradients"),
    "gather": (2, "gather channel"),
    "reduction": (3, "reduce channel"),
}


class TraceFile:
    """A step, written for Perfetto or chrome://tracing: what the program waited for, and what ran on the channels."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Checked now, so that a wrong path does not make the traced step fail.
        if not pathlib.Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"trace: {os.fspath(path)!r} is in a folder that does not exist")
        self._path = os.fspath(path)
        self._reader: TraceReader | None = None

    @property
    def begun(self) -> bool:
        """False where it was asked for in the middle of a step: the next one is traced."""
        return self._reader is not None

    def begin(self, runtime: Any) -> None:
        """Called at the beginning of the step."""
        self.drop()
        self._reader = TraceReader(runtime)

    def drop(self) -> None:
        """Discards the trace of a step that was given up."""
        if self._reader is not None:
            self._reader.drop()
            self._reader = None

    def write(self, names: Mapping[int, str], rank: int) -> None:
        """Called at the end of the step. If several ranks write to one path, the file is complete and from one of them."""
        assert self._reader is not None
        events = {"traceEvents": _events(self._reader.stop().entries, names, rank), "displayTimeUnit": "ms"}
        self._reader = None
        temporary = pathlib.Path(f"{self._path}.{os.getpid()}.part")
        temporary.write_text(json.dumps(events))
        temporary.replace(self._path)


def _events(entries: Sequence[TraceEntry], names: Mapping[int, str], rank: int) -> list[dict[str, Any]]:
    begin = min((entry.start for entry in entries), default=0)
    tracks: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
        for tid, name in _TRACKS.values()
    ]
    return tracks + [
        {
            "name": names.get(entry.id, str(entry.id)),
            "cat": entry.kind,
            "ph": "X",
            "pid": rank,
            "tid": _TRACKS[entry.kind][0],
            "ts": (entry.start - begin) / 1e3,
            "dur": (entry.end - entry.start) / 1e3,
            "args": {"bytes": entry.bytes},
        }
        for entry in entries
        if entry.kind in _TRACKS
    ]
