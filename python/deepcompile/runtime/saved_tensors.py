"""Saved-tensor hooks: of a gathered parameter autograd saves only the id, so that a release in the forward is safe.

The hooks are switched on, for the calling thread, by ``start_forward`` and by every gather under autograd, and off by
``end_forward`` and ``end_backward`` (in the plain loop, which calls neither, by ``cleanup``). While other default hooks are
active (``torch.autograd.graph.saved_tensors_hooks``, checkpointing) ours are not, and the others save what they like.
"""

from __future__ import annotations

from typing import Any

import torch

from deepcompile.runtime.load import _C


def _pack(tensor: torch.Tensor) -> Any:
    saved = _C.pack_parameter(tensor)
    return tensor if saved is None else saved


def _unpack(saved: Any) -> torch.Tensor:
    return _C.unpack_parameter(saved) if isinstance(saved, _C.SavedParameter) else saved


_C.set_saved_tensor_hooks(_pack, _unpack)
switch_on = _C.keep_gathered_as_ids
switch_off = _C.stop_keeping_gathered_as_ids
