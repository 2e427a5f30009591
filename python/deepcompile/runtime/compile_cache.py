"""Keeps torch.compile's caches on disk apart where the same graph text means something else.

A cached kernel is found by the text of its graph. The text says ``allgather_param(shard, 0, 3)`` and not what shape
parameter 3 has, nor how this version of deepcompile orders the operators. Both go into the tag that PyTorch adds to every
cache key, so that a second run of the same model finds its kernels and another model does not.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable

import torch.compiler.config

from deepcompile._version import __version__

_user_tag: str = torch.compiler.config.cache_key_tag
_shapes: dict[int, str] = {}  # of the open runtimes
_code = ""


def note_code(files: Iterable[pathlib.Path]) -> None:
    """Adds a hash of ``files`` to the tag: compiled results depend on this code, so another version must not find them."""
    global _code
    _code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
    _set_tag()


class RegisteredShapes:
    """A running digest of the parameters that one runtime has registered."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._published = False

    def add(self, *registered: object) -> None:
        self._digest.update(repr(registered).encode())
        if self._published:  # a graph was registered before its parameters
            self.publish()

    def publish(self) -> None:
        """Adds the digest to the tag. Called when a graph is registered, after which its parameters may be compiled."""
        self._published = True
        _shapes[id(self)] = self._digest.hexdigest()
        _set_tag()

    def withdraw(self) -> None:
        _shapes.pop(id(self), None)
        _set_tag()


def _set_tag() -> None:
    known = hashlib.sha256("".join(_shapes.values()).encode()).hexdigest() if _shapes else ""
    torch.compiler.config.cache_key_tag = f"{_user_tag}deepcompile-{__version__}-{_code[:16]}-{known[:16]}"
