"""Whole parameters of a sharded model: to read, to change, to save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from deepcompile.sharding import sharded_modules
from deepcompile.sharding.sharded_modules import original_class
from deepcompile.sharding.sharding import ShardedParam, Sharding, is_sharded, sharding_of


def _params_of(module: nn.Module, sharding: Sharding) -> list[ShardedParam]:
    members = set(module.parameters())
    return [sharded for sharded in sharding.params if sharded.param in members]


@contextlib.contextmanager
def full_params(module: nn.Module, *, modifier_rank: int | None = 0) -> Iterator[nn.Module]:
    """Inside the context, ``module`` and its submodules hold whole parameters, in the dtype of the shards, that can be read
    and changed in place (``nn.init.normal_(module.weight)``). At its end they are sharded again with the values that
    ``modifier_rank`` holds; with None nothing is written back. Every rank enters it; nothing may be trained inside. If one
    rank raises inside, nothing is written back and all other ranks raise at the end of the context.
    """
    sharding = sharding_of(module)
    if modifier_rank is not None and not 0 <= modifier_rank < sharding.world:
        raise ValueError(f"modifier_rank is {modifier_rank}; the group has ranks 0 to {sharding.world - 1}")
    params = _params_of(module, sharding)
    classes: dict[nn.Module, type[nn.Module]] = {}
    whole: dict[int, nn.Parameter] = {}
    for sharded in params:
        parameter = nn.Parameter(sharding.gather(sharded), requires_grad=sharded.param.requires_grad)
        whole[sharded.id] = parameter
    for sharded in params:
        for owner, attribute in sharded.places:
            if owner not in classes:
                classes[owner] = type(owner)
                owner.__class__ = original_class(owner)
            owner._parameters[attribute] = whole[sharded.id]
    # A module that holds one of these parameters may hold others that are not in `module`: they must stay readable, too.
    gathered_too: list[tuple[ShardedParam, nn.Module, str]] = []
    for sharded in sharding.params:
        if sharded.id not in whole:
            gathered_too += [(sharded, owner, attribute) for owner, attribute in sharded.places if owner in classes]
    for sharded, owner, attribute in gathered_too:
        owner._parameters[attribute] = nn.Parameter(sharding.gather(sharded), requires_grad=False)
    transfers = sharding.transfers
    try:
        yield module
    except BaseException as error:
        transfers.fail(error)
        raise
    finally:
        replaced = [
            (owner, attribute)
            for sharded in params
            for owner, attribute in sharded.places
            if owner._parameters.get(attribute) is not whole[sharded.id]
        ]
        for sharded in params:
            for owner, attribute in sharded.places:
                owner._parameters[attribute] = sharded.param
        for sharded, owner, attribute in gathered_too:
            owner._parameters[attribute] = sharded.param
        for owner, original in classes.items():
            owner.__class__ = original
    problem = _problem(params, whole, replaced, writes=modifier_rank is not None)
    if problem:
        transfers.fail(problem)
        raise RuntimeError(problem)
    # Before anything is written: raises here if another rank raised inside, since that rank joins no collective below.
    transfers.meet("has left full_params")
    if modifier_rank is not None:
        with sharding.runtime.outside_step():
            sharding.runtime.end_reads()
        for sharded in params:
            _write_back(sharding, sharded, whole[sharded.id].detach(), modifier_rank)


def _problem(
    params: list[ShardedParam], whole: dict[int, nn.Parameter], replaced: list[tuple[nn.Module, str]], writes: bool
) -> str:
    """Why the parameters cannot be sharded again; empty if they can."""
    if replaced:
        owner, attribute = replaced[0]
        return f"'{attribute}' of {type(owner).__name__} was replaced inside full_params: change parameters in place"
    for sharded in params if writes else ():
        parameter = whole[sharded.id]
        if parameter.grad is not None:
            return (
                f"a backward ran inside full_params: the gradient of '{sharded.name}' would be lost with the whole copy. "
                "Leave the context before loss.backward()"
            )
        if parameter.shape != sharded.full_shape:
            return (
                f"parameter '{sharded.name}' has shape {list(parameter.shape)} after full_params instead of "
                f"{list(sharded.full_shape)}"
            )
    return ""


def _write_back(sharding: Sharding, sharded: ShardedParam, whole: torch.Tensor, source: int) -> None:
    own = sharding.transfers.scatter(whole.to(sharded.param.dtype), source, f"parameter '{sharded.name}'")
    with torch.no_grad():
        sharded.param.copy_(own.view(sharded.param.shape))  # increments the version, which makes gathered copies stale


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, whole on every rank, in the dtypes that the model had before it was sharded.
    Every rank calls it.
    """
    return state_dict_of_wholes(model, lambda whole: whole)


def state_dict_of_wholes(model: nn.Module, kept: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, with ``kept(whole)`` in place of each parameter. Parameters are gathered one by
    one, so if ``kept`` moves or drops them no device has to hold all of them.
    """
    sharding = sharding_of(model)
    by_parameter = sharding.by_parameter()
    wholes: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        sharded = by_parameter.get(value) if isinstance(value, nn.Parameter) else None
        if sharded is None:
            result[name] = value.detach() if isinstance(value, torch.Tensor) else value
            continue
        if sharded.id not in wholes:
            wholes[sharded.id] = kept(sharding.gather(sharded).to(sharded.original_dtype))
        result[name] = wholes[sharded.id]
    return result


@contextlib.contextmanager
def whole_state_dicts(model: nn.Module) -> Iterator[None]:
    """Inside, ``state_dict()`` of ``model``, which may be sharded or contain sharded models, returns whole parameters. Every
    rank enters it and makes the same calls.
    """
    shardings = {sharding_of(module): None for module in model.modules() if is_sharded(module)}
    members = {sharded.param: (sharding, sharded) for sharding in shardings for sharded in sharding.params}
    wholes: dict[nn.Parameter, torch.Tensor] = {}

    def whole_of(param: nn.Parameter) -> torch.Tensor:
        if param not in wholes:
            sharding, sharded = members[param]
            wholes[param] = sharding.gather(sharded).to(sharded.original_dtype)
        return wholes[param]

    before, sharded_modules.whole_of = sharded_modules.whole_of, whole_of
    try:
        yield
    finally:
        sharded_modules.whole_of = before
