"""Lets AOTAutograd cache what it makes of our graphs. The one file that knows how its cache is built.

A result from that cache comes without tracing, the partitioner and the compilers, and so without what tells the planner what
a graph reads, saves and costs. So each compiled graph has a :class:`GraphRecord`, which is kept in the same entry of the
cache as the reference to its code: there is never one without the other. Where this PyTorch makes other entries, the cache
is off for our graphs.
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
#: Of the graph that is being compiled: makes a callable of code from the cache and its record.
_adopt: Adopt | None = None


class RecordedCode:
    """Stands in an entry of the cache for one compiled phase, and carries its record. To the cache it is that phase."""

    def __init__(self, code: Any, record: GraphRecord) -> None:
        self.code, self.record = code, record

    def __getattr__(self, name: str) -> Any:
        if name in ("code", "record") or name.startswith("__"):  # not there yet: it is being unpickled
            raise AttributeError(name)
        return getattr(self.code, name)

    def post_compile(self, result: Any, options: Any) -> Any:
        """Called when the code has been found: what the compiler would have returned."""
        from torch._dynamo import disable

        if _adopt is None:
            raise RuntimeError("a graph of deepcompile's was looked up by another backend")  # which compiles it then
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
    """While a graph is compiled: its result may come from AOTAutograd's cache, as a whole."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import autograd_cache  # noqa: F401

    global _adopt
    # Entries that have the code in them are made in another way.
    bundled = functorch_config.bundled_autograd_cache or getattr(dynamo_config, "caching_precompile", False)
    allowed = functorch_config.enable_autograd_cache and _installed and not bundled
    before, _adopt = _adopt, adopt
    try:
        with functorch_config.patch(enable_autograd_cache=allowed):
            yield
    finally:
        _adopt = before


after_import("torch._functorch._aot_autograd.autograd_cache", _carry_records)
