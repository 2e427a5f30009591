"""States of an optimizer whose parameters are sharded.

States of the whole parameter's size (made before sharding, or loaded from an unsharded run) are sliced at the first step or
``state_dict()`` after sharding, and in ``load_state_dict``. Each rank slices what its own optimizer holds. ``state_dict()``
returns states as :class:`StateShard`, :func:`full_optimizer_state_dict` as whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepcompile.sharding.sharding import ShardedParam, Sharding, sharding_of
from deepcompile.sharding.state_shards import Origin, StateShard, as_plain, as_state_shard

#: States of PyTorch's optimizers that are one number for each parameter. (The names tell them from the states of a scalar
#: parameter, which have the same shape.)
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})

_Members = dict[Any, tuple[Sharding, ShardedParam]]


def _members(optimizer: torch.optim.Optimizer, shardings: Iterable[Sharding]) -> _Members:
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    return {s.param: (sharding, s) for sharding in shardings for s in sharding.params if s.param in trained}


def _is_number(slot: Any, value: Any) -> bool:
    """True for one number for each parameter, and for values that are not tensors: they are not sharded."""
    return not isinstance(value, torch.Tensor) or slot in _NUMBERS


def _slice(sharding: Sharding, sharded: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
    own = sharding.slice_of(sharded, whole.detach()).clone().view(sharded.param.shape)
    follows_parameter = whole.dtype == sharded.original_dtype
    return own.to(sharded.param.dtype) if follows_parameter else own


def slice_whole_states(optimizer: torch.optim.Optimizer, shardings: Iterable[Sharding]) -> None:
    """Slices the states of an optimizer that was made, or trained, before its parameters were sharded."""
    for param, (sharding, sharded) in _members(optimizer, shardings).items():
        state = optimizer.state.get(param)
        if not isinstance(state, dict):
            continue
        whole = {
            slot: value
            for slot, value in state.items()
            if not _is_number(slot, value) and value.shape == sharded.full_shape != param.shape
        }
        for slot, value in state.items() if whole else ():
            if slot not in whole and not _is_number(slot, value) and value.numel() > 1 and value.shape != param.shape:
                raise RuntimeError(
                    f"{type(optimizer).__name__} on rank {sharding.rank}: state '{slot}' of parameter '{sharded.name}' was "
                    f"made before the parameter was sharded, and nothing says how its shape {list(value.shape)} goes with "
                    f"the parameter's {list(sharded.full_shape)}: make the optimizer after deepcompile.shard, or give "
                    "initialize a function that makes it"
                )
        state.update({slot: _slice(sharding, sharded, value) for slot, value in whole.items()})
        if param.shape == sharded.full_shape and param.dtype != sharded.original_dtype:
            _cast(state, sharded)


def _cast(state: dict[Any, Any], sharded: ShardedParam) -> None:
    """Casts states of a parameter that kept its shape but is now stored in another dtype (an fp32 master copy)."""
    for slot, value in state.items():
        if not _is_number(slot, value) and value.shape == sharded.full_shape and value.dtype == sharded.original_dtype:
            state[slot] = value.to(sharded.param.dtype)


def _of_each(
    optimizer: torch.optim.Optimizer,
    packed: Mapping[str, Any],
    members: _Members,
    changed: Callable[[Sharding, ShardedParam, Any, Any], Any],
) -> dict[str, Any]:
    """``packed``, a state dict, with ``changed(...)`` in place of each state of a sharded parameter."""
    states = dict(packed["state"])
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=False):
        for param, index in zip(group["params"], saved["params"], strict=False):
            state = states.get(index)
            if param in members and isinstance(state, dict):
                sharding, sharded = members[param]
                states[index] = {
                    slot: value if _is_number(slot, value) else changed(sharding, sharded, slot, value)
                    for slot, value in state.items()
                }
    return {**packed, "state": states}


def _origin(sharding: Sharding, sharded: ShardedParam, slot: Any) -> Origin:
    return Origin(f"state '{slot}' of parameter '{sharded.name}'", sharded.full_shape, sharding.rank, sharding.world)


def with_parts(
    optimizer: torch.optim.Optimizer, packed: dict[str, Any], shardings: Iterable[Sharding]
) -> dict[str, Any]:
    """``packed``, a state dict, with the states of sharded parameters as :class:`StateShard`."""

    def part(sharding: Sharding, sharded: ShardedParam, slot: Any, value: torch.Tensor) -> torch.Tensor:
        return as_state_shard(value, _origin(sharding, sharded, slot)) if value.dim() > 0 else value

    members = _members(optimizer, (sharding for sharding in shardings if sharding.world > 1))
    return _of_each(optimizer, packed, members, part) if members else packed


def with_own(optimizer: torch.optim.Optimizer, packed: dict[str, Any], shardings: Iterable[Sharding]) -> dict[str, Any]:
    """``packed``, the argument of ``load_state_dict``, with this rank's part in place of each whole state."""

    def own(sharding: Sharding, sharded: ShardedParam, slot: Any, value: torch.Tensor) -> torch.Tensor:
        shape = sharded.param.shape
        found = f"has shape {list(value.shape)}"
        if isinstance(value, StateShard):
            if value.origin.same_part(_origin(sharding, sharded, slot)):
                return as_plain(value)
            found += f" and is a part that rank {value.origin.rank} of {value.origin.world} has of {value.origin.what}"
        elif value.shape == sharded.full_shape:
            return _slice(sharding, sharded, value) if value.shape != shape or sharding.world > 1 else value
        elif value.dim() == 0 or (sharding.world == 1 and value.shape == shape):
            return value
        elif value.shape == shape:
            found += ", of which nothing says whether it is this rank's part"
        raise RuntimeError(
            f"{type(optimizer).__name__}.load_state_dict on rank {sharding.rank} of {sharding.world}: state '{slot}' of "
            f"parameter '{sharded.name}' {found}. It takes whole states, here of shape {list(sharded.full_shape)}, and the "
            "parts that state_dict() of such an optimizer gave in this process. Save whole states, "
            "deepcompile.full_optimizer_state_dict(model, optimizer), or use engine.save_checkpoint and load_checkpoint"
        )

    members = _members(optimizer, (sharding for sharding in shardings if not sharding.single_rank))
    return _of_each(optimizer, packed, members, own) if members and "state" in packed else packed


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of the optimizer with states as large as the whole parameters of ``model``, on every rank, as an
    unsharded optimizer has them; ``optimizer.load_state_dict`` takes it under any number of ranks. Every rank calls it.
    """

    def whole(sharding: Sharding, sharded: ShardedParam, slot: Any, value: torch.Tensor) -> torch.Tensor:
        own = as_plain(value)
        if sharding.single_rank or own.shape != sharded.param.shape:
            return own
        what = f"state '{slot}' of parameter '{sharded.name}'"
        gathered = sharding.transfers.gather(own.to(sharded.param.device), what)
        return gathered[: sharded.numel].view(sharded.full_shape).to(own.device)

    return _of_each(optimizer, optimizer.state_dict(), _members(optimizer, [sharding_of(model)]), whole)
