"""Fake kernels for the operators that move tensors to another device.

The other operators have Meta kernels in C++, whose results are on the device of their inputs.
"""

from __future__ import annotations

import torch

from deepcompile import _C


def install() -> None:
    torch.library.register_fake("dc::offload_tensor", _offloaded)
    torch.library.register_fake("dc::reload_tensor", _reloaded)


def _offloaded(a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return _like(a, torch.device("cpu"))


def _reloaded(a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return _like(a, _C.graph_device(graph_id))


def _like(a: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(a, device=a.device if a.is_meta else device, requires_grad=False)
