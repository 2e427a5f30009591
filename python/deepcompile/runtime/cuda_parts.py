"""Loads ``deepcompile._cuda``, the native module with the parts that need CUDA; builds without CUDA lack it.

It is loaded at first use. Initialising CUDA at import would keep the process from forking others that use a GPU.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch


@functools.cache
def _load() -> ModuleType | str:
    """The module, or why there is none."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU (torch.cuda.is_available() is false)"
    try:
        return importlib.import_module("deepcompile._cuda")
    except ImportError as error:
        return f"the CUDA parts were not built, or do not load ({error}); 'make build' builds them where there is nvcc"


def cuda_available() -> bool:
    """True when models on CUDA can be trained: there is a GPU, and the package was built with its CUDA parts."""
    return not isinstance(_load(), str)


def why_no_cuda() -> str:
    """Why :func:`cuda_available` is false; empty where it is true."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""


def require_cuda() -> ModuleType:
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"deepcompile cannot use CUDA here: {loaded}")
    return loaded
