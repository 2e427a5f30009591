"""What autograd saves in a forward: gathered parameters as their ids, so that a release in the forward is safe."""

from __future__ import annotations

from typing import Any

import torch

from deepcompile._load import _C


def _pack(tensor: torch.Tensor) -> Any:
    saved = _C.pack_parameter(tensor)
    return tensor if saved is None else saved


def _unpack(saved: Any) -> torch.Tensor:
    return _C.unpack_parameter(saved) if isinstance(saved, _C.SavedParameter) else saved


class SavedTensorHooks:
    """On from ``start_forward`` to ``end_forward``. Both may be called again; the first one counts."""

    def __init__(self) -> None:
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def enter(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
            self._hooks.__enter__()

    def leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
