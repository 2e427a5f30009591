"""Functions that write parameters somewhere, of PyTorch and of safetensors, made right for shards: what is one rank's part
alone is refused, and what promises whole parameters gives them.

``torch.save``, ``pickle`` and queues of processes need no change: a part refuses them itself (``state_shards.py``,
``shard_parameter.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepcompile.runtime.after_import import after_import
from deepcompile.sharding.state_shards import ADVICE, origin_of
from deepcompile.sharding.unsharded import whole_state_dicts


def install() -> None:
    after_import("safetensors.torch", _refuse_in_safetensors)
    after_import("torch.distributed.checkpoint", _refuse_in_async_save)
    after_import("torch.distributed.checkpoint.state_dict", _wrap_get_model_state_dict)


def _refuse_parts(values: Iterable[Any]) -> None:
    for value in values:
        origin = origin_of(value)
        if origin is not None:
            origin.refuse()


#: Those that everybody calls, and those that they call in the releases 0.4 to 0.8, for programs that imported the former
#: before a model was sharded.
_OF_SAFETENSORS = ("save", "save_file", "_flatten", "_evaluate_tensors_for_save")


def _refuse_in_safetensors(module: ModuleType) -> None:
    def refuses(inner: Any) -> Any:
        @functools.wraps(inner)
        def function(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_parts(tensors.values() if isinstance(tensors, Mapping) else ())
            return inner(tensors, *args, **kwargs)

        return function

    for name in _OF_SAFETENSORS:
        if hasattr(module, name):
            setattr(module, name, refuses(getattr(module, name)))


def _refuse_in_async_save(module: Any) -> None:
    """It copies tensors into memory of its own first, which knows nothing of parts."""
    inner = module.async_save

    @functools.wraps(inner)
    def async_save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(tree_leaves(state_dict))
        return inner(state_dict, *args, **kwargs)

    module.async_save = module.state_dict_saver.async_save = async_save


def _wrap_get_model_state_dict(module: Any) -> None:
    """Of torch.distributed.checkpoint: ``get_model_state_dict`` and ``get_state_dict``."""
    inner = getattr(module, "_get_model_state_dict", None)  # what both call, also where they were imported before
    if inner is None:
        return

    @functools.wraps(inner)
    def get_model_state_dict(model: torch.nn.Module, info: Any) -> Any:
        origins = (origin_of(param) for param in (model.parameters() if info.handle_model else ()))
        origin = next((origin for origin in origins if origin is not None), None)
        if origin is not None and not info.full_state_dict:
            raise RuntimeError(
                f"get_model_state_dict would give rank {origin.rank} of {origin.world} its flat part of each parameter, "
                "because the model is sharded by deepcompile: pass options=StateDictOptions(full_state_dict=True) for whole "
                f"ones. {ADVICE}"
            )
        with whole_state_dicts(model):
            return inner(model, info)

    module._get_model_state_dict = get_model_state_dict
