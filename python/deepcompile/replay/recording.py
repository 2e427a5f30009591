"""``with deepcompile.record():`` notes the communication of the iterations inside it; ``get_recorded_ops()`` returns it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import nn

from deepcompile.replay.recorded_ops import ModelRecord, RecordedOp, RecordedOps, dtype_name
from deepcompile.runtime.load import _C
from deepcompile.sharding.sharding import Sharding, open_shardings, sharding_of

_CHANNEL_KINDS = {"gather": "all_gather", "reduce": "reduce_scatter"}


class _Last:
    """The last finished recording, and who is recording."""

    ops: RecordedOps | None = None
    active: frozenset[Sharding] = frozenset()


@contextlib.contextmanager
def record(model: nn.Module | None = None) -> Iterator[None]:
    """Records the iterations inside: forward, backward and, if it belongs to the measured step, the optimizer's. ``model``
    is needed only where several sharded models run inside. Every rank records.
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
    began = [start(sharding) for sharding in shardings]
    try:
        yield
        found = [stop(sharding, moment) for sharding, moment in zip(shardings, began, strict=True)]
        taken = [ops for ops in found if len(ops) > 0]
        if len(taken) > 1:
            names = " and ".join(ops.model.model for ops in taken)
            raise RuntimeError(f"deepcompile.record: {names} ran inside; name one of them: deepcompile.record(model)")
        _Last.ops = taken[0] if taken else found[0]
        require_whole_iterations(_Last.ops)
    finally:
        _Last.active = frozenset()
        for sharding in shardings:
            if sharding.is_open:
                _C.stop_recording(sharding.graph_id)


def get_recorded_ops() -> RecordedOps:
    """What the last ``deepcompile.record()`` noted, on this rank."""
    if _Last.ops is None:
        raise RuntimeError(
            "get_recorded_ops: nothing was recorded; run an iteration inside 'with deepcompile.record():' first"
        )
    return _Last.ops


def start(sharding: Sharding, *, compiled: bool = False) -> int:
    """``compiled``: the program may run compiled graphs, whose runs are noted as well. Returns the moment, in nanoseconds
    of the steady clock, for :func:`stop`."""
    sharding.runtime.take_timeline()
    sharding.calls = [] if compiled else None
    _C.start_recording(sharding.graph_id)
    return time.monotonic_ns()


def drop(sharding: Sharding) -> None:
    """Ends a recording that nobody wants. A device is not waited for."""
    sharding.calls = None
    _C.drop_recording(sharding.graph_id)


def stop(sharding: Sharding, began: int) -> RecordedOps:
    """Everything since :func:`start`, which said ``began``. On a device it waits for what was launched."""
    compiled = _C.recorded_compiled(sharding.graph_id)
    calls, sharding.calls = sharding.calls, None
    ops, ended = _C.stop_recording(sharding.graph_id)
    spans = sharding.runtime.take_timeline()
    if compiled and calls is None:
        raise RuntimeError(
            "deepcompile.record: compiled code communicated; a compiled graph has a plan of its own. Record the model "
            'uncompiled (config "compile": {"mode": "off"}, and no torch.compile around it), or leave it compiled'
        )
    names = {sharded.id: sharded.name for sharded in sharding.params} | {-1: ""}
    dtypes = {sharded.id: dtype_name(sharded.read_dtype) for sharded in sharding.params}
    called = (call.step.name for call in calls or ())
    found = [
        RecordedOp(
            kind,
            next(called) if kind == "call" else names[id],
            size,
            dtype_name(dtype),
            "backward" if backward else "forward",
            iteration,
            micro,
            begin,
            end,
        )
        for kind, id, dtype, size, backward, iteration, micro, begin, end in ops
    ]
    leaves = {sharded.name for sharded in sharding.params if sharded.leaf}
    if calls is not None:  # what graphs launch by plans of their own is time spent, and no read
        found = [op._replace(kind="wait") if op.kind == "prefetch" and op.param not in leaves else op for op in found]
    found += _channel_ops(spans, found, names, dtypes)
    found.sort(key=lambda op: op.start)
    zero = found[0].start if found else 0
    # One rank that holds whole parameters communicates nothing: there the iteration is all there is.
    last = max((op.end for op in found if op.kind == "end"), default=began)
    return RecordedOps(
        [op._replace(start=op.start - zero, end=op.end - zero) for op in found],
        model=ModelRecord.of(sharding),
        tail=max(0, ended - last) * 1e-9,
    )


def _channel_ops(
    spans: list[tuple[str, int, int, int, int]], ops: list[RecordedOp], names: dict[int, str], dtypes: dict[int, str]
) -> list[RecordedOp]:
    """What ran on the channels, each in the pass of the program's operation before it."""
    result = []
    at, last = 0, None
    for kind, id, size, begin, end in sorted(spans, key=lambda span: span[3]):
        if kind not in _CHANNEL_KINDS:
            continue
        while at < len(ops) and ops[at].start <= begin:
            last = ops[at]
            at += 1
        phase, iteration, micro = (last.phase, last.iteration, last.micro) if last else ("forward", 0, 0)
        result.append(
            RecordedOp(_CHANNEL_KINDS[kind], names[id], size, dtypes[id], phase, iteration, micro, begin, end)
        )
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
