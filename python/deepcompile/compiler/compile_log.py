"""Says what is being compiled, and how long that took: a first step is silent for half a minute otherwise."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator

from deepcompile.sharding.sharding import Sharding

_log = logging.getLogger("deepcompile")

#: Graphs that were compiled of a model so far, where it is one in several graphs, or for several shapes.
_graphs: weakref.WeakKeyDictionary[Sharding, int] = weakref.WeakKeyDictionary()


def graph_name(sharding: Sharding) -> str:
    """Of the next graph of a model, for people."""
    number = _graphs[sharding] = _graphs.get(sharding, 0) + 1
    model = type(sharding.model_or_none).__name__
    return model if number == 1 else f"{model}, graph {number}"


@contextlib.contextmanager
def compiling(what: str, sharding: Sharding | None) -> Iterator[None]:
    """One line before and one after, from rank 0 of the model's ranks. Nothing of graphs without a parameter of a model."""
    says = sharding is not None and sharding.rank == 0
    if says:
        _log.info("compiling %s", what)
    started = time.monotonic()
    yield
    if says:
        _log.info("compiled %s in %.1f s", what, time.monotonic() - started)
