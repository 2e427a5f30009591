"""Lets AOTAutograd cache its results for our graphs. Only this file depends on the structure of that cache.

A cached result is used without running the partitioner and the compilers, so the planner would not learn what the graph
reads, saves and costs. So each compiled graph has a :class:`GraphRecord`, stored in the same cache entry as the reference
to its code. If the installed PyTorch has no ``AOTAutogradCache.make_entry`` to wrap, the cache is off for our graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from deepcompile.compiler.planned_graph import GraphRecord
from deepcompile.runtime.after_import import after_import

Adopt = Callable[[Any, GraphRecord], Any]

_installed = False
#: While a graph is compiled: makes a callable from cached code and its record.
_adopt: Adopt | None = None


class RecordedCode:
    """Replaces the entry's code of one phase: adds the record, and forwards everything else to the code."""

    def __init__(self, code: Any, record: GraphRecord) -> None:
        self.code, self.record = code, record

    def __getattr__(self, name: str) -> Any:
        if name in ("code", "record") or name.startswith("__"):  # during unpickling they do not exist yet
            raise AttributeError(name)
        return getattr(self.code, name)

    def post_compile(self, result: Any, options: Any) -> Any:
        """Called on a cache hit. Returns what the compiler would have returned."""
        from torch._dynamo import disable

        if _adopt is None:
            # AOTAutograd treats the error as a miss and compiles.
            raise RuntimeError("a graph of deepcompile's was looked up by another backend")
        function = self.code.post_compile(result, options)
        bare = getattr(function, "_torchdynamo_orig_callable", None)
        if bare is None:
            return _adopt(function, self.record)
        graph = _adopt(bare, self.record)
        return disable(graph, reason="code of a backward is not traced")  # type: ignore[no-untyped-call]


def _carry_records(autograd_cache: ModuleType) -> None:
    global _installed
    cache = getattr(autograd_cache, "AOTAutogradCache", None)
    make_entry = getattr(cache, "make_entry", None)
    if make_entry is None:
        return

    @functools.wraps(make_entry)
    def make_entry_with_records(compiled_fw_func: Any, compiled_bw_func: Any, *args: Any, **kwargs: Any) -> Any:
        entry = make_entry(compiled_fw_func, compiled_bw_func, *args, **kwargs)
        for name, function in (("compiled_fw", compiled_fw_func), ("compiled_bw", compiled_bw_func)):
            record = getattr(function, "deepcompile_record", None)
            if record is not None:
                setattr(entry, name, RecordedCode(getattr(entry, name), record))
        return entry

    cache.make_entry = staticmethod(make_entry_with_records)  # type: ignore[union-attr]
    _installed = True


@contextlib.contextmanager
def caching(adopt: Adopt) -> Iterator[None]:
    """While a graph is compiled: lets AOTAutograd's cache serve it, and ``adopt`` wrap the cached code."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import autograd_cache  # noqa: F401

    global _adopt
    # Bundled entries, which contain the code itself, are made by another function.
    bundled = functorch_config.bundled_autograd_cache or getattr(dynamo_config, "caching_precompile", False)
    allowed = functorch_config.enable_autograd_cache and _installed and not bundled
    before, _adopt = _adopt, adopt
    try:
        with functorch_config.patch(enable_autograd_cache=allowed):
            yield
    finally:
        _adopt = before


after_import("torch._functorch._aot_autograd.autograd_cache", _carry_records)
