"""Logs what is being compiled and how long it took, because a first step may take half a minute."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator

from deepcompile.sharding.sharding import Sharding

_log = logging.getLogger("deepcompile")

#: How many graphs of each model were compiled so far. (A model has several if there are graph breaks or several shapes.)
_graphs: weakref.WeakKeyDictionary[Sharding, int] = weakref.WeakKeyDictionary()


def graph_name(sharding: Sharding) -> str:
    """A name for the next graph of a model, for messages."""
    number = _graphs[sharding] = _graphs.get(sharding, 0) + 1
    model = type(sharding.model_or_none).__name__
    return model if number == 1 else f"{model}, graph {number}"


@contextlib.contextmanager
def compiling(what: str, sharding: Sharding | None) -> Iterator[None]:
    """Rank 0 logs one line before and one after. Nothing is logged for graphs without sharded parameters (None)."""
    logs = sharding is not None and sharding.rank == 0
    if logs:
        _log.info("compiling %s", what)
    started = time.monotonic()
    yield
    if logs:
        _log.info("compiled %s in %.1f s", what, time.monotonic() - started)
