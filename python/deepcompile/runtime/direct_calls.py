"""Replaces the functions behind ``torch.ops.dc.*`` by faster ones (src/bindings/direct_calls.cpp).

Must run before any code uses an operator as a dict key, because an operator's hash is that of the function it calls.
"""

from __future__ import annotations

import inspect

import torch
from torch.jit._builtins import _register_builtin
from torch.utils._device import DeviceContext

from deepcompile import _C


def install() -> None:
    _C.set_default_device_mode(DeviceContext)
    for name in _C.direct_operators():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator)
        for called in (packet, packet.default):
            signature = inspect.signature(called)  # a C++ function has none
            called._op = _C.direct_call(name, called._op)
            # PyTorch's own __call__ is a Python function that calls self._op. That frame is a fifth of the time of a gather,
            # wait and release.
            members = {"__call__": called._op, "__signature__": signature, "__slots__": ()}
            called.__class__ = type(type(called).__name__, (type(called),), members)
            _C.call_instances_directly(type(called), called._op)
        _register_builtin(packet._op, name)  # TorchScript looks operators up by the function that they call
