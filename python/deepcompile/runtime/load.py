"""Loads the native library, after checking that it was built for this PyTorch and that its operator names are free."""

from __future__ import annotations

import sys

import torch

from deepcompile.runtime import fits

#: Operator namespaces that the native library registers.
NAMESPACES = ("dc", "deepspeed")


def _taken(namespaces: tuple[str, ...]) -> list[str]:
    """The operators that another library has already registered under one of our names."""
    prefixes = tuple(f"{name}::" for name in namespaces)
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefixes))


fits.require_fit(torch.__version__)

if "deepcompile._C" not in sys.modules and (taken := _taken(NAMESPACES)):
    raise ImportError(
        f"another library in this process owns the operators torch.ops.{taken[0].split('::')[0]}.* "
        f"(for example {taken[0]}), which deepcompile registers too. Load only one of the two: DeepSpeed's extensions "
        "and deepcompile cannot share a process."
    )

try:
    from deepcompile import _C
except ImportError as error:
    raise ImportError(fits.why_not_loaded(torch.__version__, error)) from None

from deepcompile.runtime import direct_calls, fakes  # noqa: E402

direct_calls.install()
fakes.install()

__all__ = ["_C"]
