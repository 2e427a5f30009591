"""Checks that all ranks shard the same model, before anything else is exchanged."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch.distributed as dist

from deepcompile.runtime.load import _C

#: (name, shape, dtype, trainable) of a parameter or a buffer.
Entry = tuple[str, tuple[int, ...], str, bool]

_last_serial = 0


@dataclasses.dataclass(frozen=True)
class Identity:
    """The numbers of one sharded model; the same on all ranks."""

    #: The lowest graph id that is free on all ranks: 0, unless another engine or the program itself uses it.
    graph_id: int
    #: Counts sharded models. Never reused, unlike a graph id, which is free again when its engine is closed.
    serial: int


def agree_on_model(entries: list[Entry], group: dist.ProcessGroup) -> Identity:
    """The identity that all ranks use. If the ranks hold different models, an error that names the first difference."""
    global _last_serial
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (entries, _C.graph_ids(), _last_serial), group=group)
    first_rank = by_rank[0][0]
    for rank, (theirs, _, _) in enumerate(by_rank):
        for index, (first, other) in enumerate(itertools.zip_longest(first_rank, theirs)):
            if first != other:
                raise RuntimeError(
                    f"the ranks hold different models: parameter or buffer {index} is {_describe(first)} on rank 0 and "
                    f"{_describe(other)} on rank {rank} (said by rank {group.rank()})"
                )
    taken = {graph_id for _, graph_ids, _ in by_rank for graph_id in graph_ids}
    _last_serial = 1 + max(serial for _, _, serial in by_rank)
    return Identity(next(graph_id for graph_id in itertools.count() if graph_id not in taken), _last_serial)


def _describe(entry: Entry | None) -> str:
    if entry is None:
        return "missing"
    name, shape, dtype, trainable = entry
    return f"'{name}' {list(shape)} {dtype}{'' if trainable else ', without gradient,'}"
