"""``with deepcompile.record():`` records the communication of the iterations inside; ``get_recorded_ops()`` returns it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from deepcompile.replay.recorded_ops import ModelRecord, RecordedOp, RecordedOps, dtype_name
from deepcompile.runtime.step_trace import Trace, TraceEntry, TraceReader
from deepcompile.sharding.sharding import Sharding, open_shardings, sharding_of


class _Last:
    """The last finished recording, and the models that are being recorded."""

    ops: RecordedOps | None = None
    active: frozenset[Sharding] = frozenset()


@contextlib.contextmanager
def record(model: nn.Module | None = None) -> Iterator[None]:
    """Records the iterations inside: forward, backward and, if it is inside, the optimizer's step. ``model`` is needed only
    if several sharded models run inside. Every rank records.
    """
    shardings = [sharding_of(model)] if model is not None else open_shardings()
    if not shardings:
        raise RuntimeError(
            "deepcompile.record: no model is sharded in this process; call deepcompile.shard(model, config) or "
            "deepcompile.initialize first"
        )
    if _Last.active:
        raise RuntimeError("deepcompile.record: a recording is open already; recordings cannot be nested")
    _Last.active = frozenset(shardings)
    recordings = [Recording(sharding) for sharding in shardings]
    try:
        yield
        found = [recording.stop() for recording in recordings]
        taken = [ops for ops in found if len(ops) > 0]
        if len(taken) > 1:
            names = " and ".join(ops.model.model for ops in taken)
            raise RuntimeError(f"deepcompile.record: {names} ran inside; name one of them: deepcompile.record(model)")
        _Last.ops = taken[0] if taken else found[0]
        require_whole_iterations(_Last.ops)
    finally:
        _Last.active = frozenset()
        for recording in recordings:
            recording.drop()


def get_recorded_ops() -> RecordedOps:
    """The operations that the last ``deepcompile.record()`` recorded on this rank."""
    if _Last.ops is None:
        raise RuntimeError(
            "get_recorded_ops: nothing was recorded; run an iteration inside 'with deepcompile.record():' first"
        )
    return _Last.ops


class Recording:
    """Records the communication of a sharded model from its construction until :meth:`stop` or :meth:`drop`."""

    def __init__(self, sharding: Sharding, *, compiled: bool = False) -> None:
        """``compiled``: the program may run compiled graphs, whose calls are recorded, too."""
        self._sharding = sharding
        sharding.calls = [] if compiled else None
        self._reader = TraceReader(sharding.runtime, releases=True)

    def drop(self) -> None:
        """Discards the recording. Does not wait for a device."""
        self._sharding.calls = None
        self._reader.drop()

    def stop(self) -> RecordedOps:
        """Ends the recording and returns its operations. Waits for a device."""
        sharding, trace = self._sharding, self._reader.stop()
        calls, sharding.calls = sharding.calls, None
        if trace.compiled_code and calls is None:
            raise RuntimeError(
                "deepcompile.record: compiled code communicated; a compiled graph has a plan of its own. Record the model "
                'uncompiled (config "compile": {"mode": "off"}, and no torch.compile around it), or leave it compiled'
            )
        found = _ops_of(trace, sharding.names | {-1: ""}, [call.step.name for call in calls or ()])
        zero = found[0].start if found else 0
        # A single rank that holds whole parameters has no operations; then the tail is the whole iteration.
        last = max((op.end for op in found if op.kind == "end"), default=trace.began)
        return RecordedOps(
            [op._replace(start=op.start - zero, end=op.end - zero) for op in found],
            model=ModelRecord.of(sharding),
            tail=max(0, trace.ended - last) * 1e-9,
        )


_KINDS = {"group": "prefetch", "release": "release", "gradient": "reduce", "end_backward": "end", "begin_graph": "call"}
_CHANNEL_KINDS = {"gather": "all_gather", "reduction": "reduce_scatter"}


def _ops_of(trace: Trace, names: Mapping[int, str], called: Sequence[str]) -> list[RecordedOp]:
    """``called``: the names of the compiled graphs that ran, in order."""
    graphs = iter(called)
    program: list[RecordedOp] = []
    channels: list[TraceEntry] = []
    for entry in trace.entries:
        if entry.kind in _CHANNEL_KINDS:
            channels.append(entry)
        elif entry.kind == "read":
            kind = "gather" if entry.gathers else "read"
            program.append(_op(entry, kind, names[entry.id])._replace(end=entry.launched))
            program.append(_op(entry, "wait", names[entry.id])._replace(start=entry.launched))
        else:
            name = next(graphs) if entry.kind == "begin_graph" else names[entry.id]
            program.append(_op(entry, _KINDS[entry.kind], name))
    program.sort(key=lambda op: op.start)
    found = program + _channel_ops(channels, program, names)
    return sorted(found, key=lambda op: op.start)


def _op(entry: TraceEntry, kind: str, name: str) -> RecordedOp:
    return RecordedOp(
        kind,
        name,
        entry.bytes,
        dtype_name(entry.dtype),
        "backward" if entry.backward else "forward",
        entry.iteration,
        entry.micro,
        entry.start,
        entry.end,
    )


def _channel_ops(
    entries: Iterable[TraceEntry], program: Sequence[RecordedOp], names: Mapping[int, str]
) -> list[RecordedOp]:
    """The collectives on the channels. Each gets phase and iteration of the program's last operation before it."""
    result = []
    at, last = 0, None
    for entry in sorted(entries, key=lambda entry: entry.start):
        while at < len(program) and program[at].start <= entry.start:
            last = program[at]
            at += 1
        op = _op(entry, _CHANNEL_KINDS[entry.kind], names[entry.id])
        phase, iteration, micro = (last.phase, last.iteration, last.micro) if last else ("forward", 0, 0)
        result.append(op._replace(phase=phase, iteration=iteration, micro=micro))
    return result


def require_whole_iterations(ops: RecordedOps) -> None:
    if ops.model.world == 1 and not ops:
        return  # one rank holds whole parameters and communicates nothing
    reads = [op for op in ops if op.kind in ("gather", "read", "prefetch")]
    if not reads:
        raise RuntimeError(
            "deepcompile.record: nothing was recorded: no sharded parameter was read inside. Put the forward and the "
            "backward of an iteration into the block"
        )
    ends = [index for index, op in enumerate(ops) if op.kind == "end"]
    if not ends:
        raise RuntimeError(
            f"deepcompile.record: half an iteration was recorded: {len(reads)} reads and no end of a backward. Put the "
            "backward into the block as well, and check that the loss depends on a trainable parameter"
        )
    if not any(op.phase == "forward" for op in reads):
        raise RuntimeError(
            "deepcompile.record: half an iteration was recorded: a backward whose forward ran before the block. Put the "
            "forward into the block as well"
        )
    rest = [op for op in ops[ends[-1] + 1 :] if op.kind in ("gather", "prefetch")]
    if rest:
        raise RuntimeError(
            f"deepcompile.record: half an iteration was recorded: '{rest[0].param}' was gathered after the last backward. "
            "End the block after a backward or an optimizer step, and evaluate outside of it"
        )
