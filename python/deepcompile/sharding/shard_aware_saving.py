"""Wraps functions of PyTorch and safetensors that save parameters. They refuse to write one rank's part alone;
``get_model_state_dict(full_state_dict=True)`` returns whole parameters.

``torch.save``, ``pickle`` and multiprocessing queues need no wrapper: pickling a shard raises (``state_shards.py``,
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


#: The public functions, and the internal ones that they call in releases 0.4 to 0.8. The latter catch programs that imported
#: the public ones before a model was sharded.
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
    """``async_save`` first copies tensors to staging memory as plain tensors, which no longer refuse to be saved."""
    inner = module.async_save

    @functools.wraps(inner)
    def async_save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(tree_leaves(state_dict))
        return inner(state_dict, *args, **kwargs)

    module.async_save = module.state_dict_saver.async_save = async_save


def _wrap_get_model_state_dict(module: Any) -> None:
    """Wraps ``get_model_state_dict`` and ``get_state_dict`` of torch.distributed.checkpoint."""
    # Both call this internal function, so wrapping it also serves programs that imported them before.
    inner = getattr(module, "_get_model_state_dict", None)
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
