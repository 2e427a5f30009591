"""The operations of a recorded iteration: a list that prints as a table, can be pickled, and is saved as text."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from deepcompile.sharding.sharding import Sharding

_FORMAT = "deepcompile recorded ops 1"

#: Kinds of operations: of the program, in its order, and (``all_gather``, ``reduce_scatter``) of the channels.
KINDS = ("gather", "read", "prefetch", "wait", "release", "reduce", "end", "all_gather", "reduce_scatter", "call")


class RecordedOp(NamedTuple):
    """One operation. Operations of the program: ``gather`` (a read that started a gather), ``read`` (of an existing copy),
    ``prefetch`` (a leaf module's parameters), ``wait``, ``release``, ``reduce`` (a gradient handed over), ``end`` (of a
    backward), ``call`` (a compiled graph begins; ``param`` is its name). ``all_gather`` and ``reduce_scatter`` are the
    collectives that ran on the channels.
    """

    kind: str
    param: str  # "" for end; the first of several
    bytes: int  # of the whole parameter or gradient
    dtype: str
    phase: str  # "forward" or "backward"
    iteration: int
    micro: int  # micro-batch
    start: int  # nanoseconds since the recording's first operation
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * 1e-9


class ParamRecord(NamedTuple):
    """A parameter as far as a plan depends on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # that modules read
    trainable: bool
    persistent: bool
    leaf: bool


@dataclasses.dataclass(frozen=True)
class ModelRecord:
    """The model that operations were recorded of. Equal on all ranks, and in every process that shards the same model in the
    same way.
    """

    model: str
    world: int
    stage: int
    params: tuple[ParamRecord, ...]

    @staticmethod
    def of(sharding: Sharding) -> ModelRecord:
        params = tuple(
            ParamRecord(
                s.name,
                tuple(s.full_shape),
                dtype_name(s.read_dtype),
                s.param.requires_grad,
                s.persistent,
                s.leaf,
            )
            for s in sharding.params
        )
        return ModelRecord(type(sharding.model).__qualname__, sharding.world, sharding.config.stage, params)

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def difference(self, other: ModelRecord) -> str:
        """The first difference to ``other``, in words; empty if there is none."""
        for what in ("stage", "world"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                name = {"stage": "ZeRO stage", "world": "number of ranks"}[what]
                return f"the {name} was {mine} and is {theirs}"
        own, others = ({p.name: p for p in record.params} for record in (self, other))
        for name in own.keys() ^ others.keys():
            return f"parameter '{name}' is {'gone' if name in own else 'new'}"
        for name, param in own.items():
            for field, before, after in zip(ParamRecord._fields, param, others[name], strict=True):
                if before != after:
                    return f"'{field}' of parameter '{name}' was {before} and is {after}"
        return "" if self.params == other.params else "the parameters are in another order"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class RecordedOps(list[RecordedOp]):
    """The operations of one or more iterations of one model on this rank. ``print`` shows a table."""

    def __init__(self, ops: Any = (), *, model: ModelRecord, tail: float = 0.0) -> None:
        super().__init__(ops)
        self.model = model
        #: Seconds from the end of the last backward to the end of the recording: the optimizer's step.
        self.tail = tail

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickle, (list(map(tuple, self)), self.model, self.tail))

    @property
    def iterations(self) -> int:
        return 1 + max((op.iteration for op in self), default=-1)

    def table(self, most: int = 60) -> str:
        m = self.model
        head = (
            f"{len(self)} operations of {m.model} ({len(m.params)} parameters), ZeRO-{m.stage} on {m.world} ranks, "
            f"{self.iterations} iterations"
        )
        lines = [head, f"{'ms':>10} {'took us':>9}  {'kind':<14} {'pass':<8} {'batch':>5} {'bytes':>11}  parameter"]
        shown = self if len(self) <= most else self[: most // 2]
        lines += map(_row, shown)
        if len(self) > most:
            lines.append(f"{'...':>10}  {len(self) - 2 * (most // 2)} more")
            lines += map(_row, self[-(most // 2) :])
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.table()

    # -- text ----------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        m = self.model
        lines = [_FORMAT, f"model {_word(m.model)} world={m.world} stage={m.stage} tail={round(self.tail * 1e9)}"]
        for p in m.params:
            shape = "x".join(map(str, p.shape)) or "scalar"
            flags = "".join(
                f" {flag}"
                for flag, on in (("frozen", not p.trainable), ("persistent", p.persistent), ("leaf", p.leaf))
                if on
            )
            lines.append(f"param {_word(p.name)} {shape} {p.dtype}{flags}")
        for op in self:
            lines.append(
                f"{op.kind} {_word(op.param)} {op.bytes} {op.dtype} {op.phase} {op.iteration} {op.micro} {op.start} {op.end}"
            )
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, file: str = "recorded ops") -> RecordedOps:
        lines = text.splitlines()
        if not lines or lines[0] != _FORMAT:
            raise ValueError(f"{file}: not a file of recorded ops (it should begin with {_FORMAT!r})")
        name, counts = "", {"world": 0, "stage": 0, "tail": 0}
        params: list[ParamRecord] = []
        ops: list[RecordedOp] = []
        for number, line in enumerate(lines[1:], 2):
            words = line.split()
            try:
                if not words:
                    continue
                if words[0] == "model":
                    name = _unword(words[1])
                    counts |= {key: int(value) for key, value in (word.split("=") for word in words[2:])}
                elif words[0] == "param":
                    shape = () if words[2] == "scalar" else tuple(int(size) for size in words[2].split("x"))
                    flags = set(words[4:])
                    params.append(
                        ParamRecord(
                            _unword(words[1]),
                            shape,
                            words[3],
                            "frozen" not in flags,
                            "persistent" in flags,
                            "leaf" in flags,
                        )
                    )
                elif words[0] in KINDS:
                    kind, param, size, dtype, phase, *numbers = words
                    iteration, micro, start, end = map(int, numbers)
                    ops.append(RecordedOp(kind, _unword(param), int(size), dtype, phase, iteration, micro, start, end))
                else:
                    raise ValueError(f"no operation is called {words[0]!r}")
            except (ValueError, IndexError) as error:
                raise ValueError(f"{file}, line {number}: {line!r} is not a line of recorded ops ({error})") from None
        if not name:
            raise ValueError(f"{file}: the line that begins with 'model' is missing")
        return cls(
            ops, model=ModelRecord(name, counts["world"], counts["stage"], tuple(params)), tail=counts["tail"] * 1e-9
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        pathlib.Path(path).write_text(self.text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordedOps:
        return cls.parse(pathlib.Path(path).read_text(), os.fspath(path))


def _word(name: str) -> str:
    """A name, percent-encoded, as one word of the text; "-" for the empty name."""
    return "%2D" if name == "-" else quote(name, safe=_READABLE) or "-"


def _unword(word: str) -> str:
    return "" if word == "-" else unquote(word)


#: Characters that are not percent-encoded.
_READABLE = "/:;,=+*?!@$&'()[]{}<>|^~#"


def _unpickle(ops: list[Any], model: ModelRecord, tail: float) -> RecordedOps:
    return RecordedOps([RecordedOp(*op) for op in ops], model=model, tail=tail)


def _row(op: RecordedOp) -> str:
    took = (op.end - op.start) / 1e3
    size = f"{op.bytes:,}" if op.bytes else ""
    return (
        f"{op.start / 1e6:>10.3f} {took:>9.1f}  {op.kind:<14} {op.phase:<8} {op.iteration}.{op.micro:<3} {size:>11}  "
        f"{op.param}"
    )
