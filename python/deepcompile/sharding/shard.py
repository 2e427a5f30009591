"""Shards the parameters of any ``nn.Module`` over a process group, in place.

Each parameter object stays where it is, in its modules and in the groups of its optimizer, but holds this rank's part of
the flattened parameter from then on (:attr:`full_shape` is its shape as a whole). The classes of the modules become
subclasses whose properties read a parameter through an operator that gathers it and whose autograd formula reduces its
gradient. So forward code sees whole weights, in eager mode and under torch.compile alike.

ZeRO-1 and 2 are the same with parameters that stay gathered from update to update; ZeRO-1 also lets gradients add up on each
rank until the backward before an update.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from deepcompile.config.config import Config, accumulation_steps, load_config
from deepcompile.runtime.group_transfers import GroupTransfers
from deepcompile.runtime.process_group import resolve_or_make
from deepcompile.sharding import shard_aware_torch
from deepcompile.sharding.deferred import InitFunction, make_shards
from deepcompile.sharding.model_agreement import agree_on_model
from deepcompile.sharding.shard_parameter import make_shard
from deepcompile.sharding.sharding import HALF, ShardedParam, Sharding, is_sharded


def shard(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    init_fn: InitFunction | None = None,
) -> nn.Module:
    """Shards ``model`` in place over ``process_group`` and returns it. Every rank calls it; the values are those of rank 0.
    ``process_group`` defaults to the default group, which is made if the program has made none: of the launcher's ranks
    (torchrun), else of this process alone. Optimizers may be made before or after: parameters keep their identity, except
    those without data (:func:`deepcompile.init_sharded`, device ``meta``). Those are initialised here, module by module, by
    the module's ``reset_parameters`` and by ``init_fn``.
    """
    checked = load_config(config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard takes a torch.nn.Module, not {type(model).__name__}")
    group = resolve_or_make(process_group)
    checked.gradient_accumulation_steps = accumulation_steps(checked, group.size())
    transfers = GroupTransfers(group, checked.timeout)
    try:
        _check_modules(model)
        found = _find_params(model, checked)
        if group.size() > 1:  # (on one rank hooks work: autograd leaves gradients on the parameters)
            _check_hooks(found)
    except Exception as error:
        transfers.fail(error)
        raise
    transfers.meet(f"is about to shard a {type(model).__name__}")
    entries = [(s.name, tuple(s.full_shape), str(s.original_dtype), s.param.requires_grad) for s in found]
    entries += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    sharding = Sharding(model, checked, group, agree_on_model(entries, group), transfers)
    without_data = [*(sharded.param for sharded in found), *model.buffers()]
    device = sharding.runtime.device
    made = make_shards(model, init_fn, group, device) if any(tensor.is_meta for tensor in without_data) else {}
    for sharded in found:
        if sharded.param.is_meta:
            sharding.params.append(_put_shard(sharded, made.pop(sharded.param), sharding))
        else:
            _replace_by_shard(sharded, sharding)
            sharding.params.append(sharded)
    for name, buffer in model.named_buffers():
        if buffer.numel() > 0 and group.size() > 1:
            transfers.broadcast(buffer, 0, f"buffer '{name}'")
    if not sharding.single_rank:
        for sharded in sharding.params:
            _refuse_hooks(sharded)
            if sharding.world > 1:
                sharded.param.origin = sharding.origin(sharded)  # type: ignore[attr-defined]
    sharding.register()
    shard_aware_torch.install()
    return model


def _check_modules(model: nn.Module) -> None:
    for module in model.modules():
        if is_sharded(module):
            raise ValueError(f"{type(module).__name__} is sharded already; shard each model once, as a whole")
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(f"a {type(module).__name__} averages gradients itself: shard the model inside it (.module)")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a TorchScript module cannot be sharded; shard the Python module that it was made from")


def _find_params(model: nn.Module, config: Config) -> list[ShardedParam]:
    leaves = _leaf_parameters(model, config.zero_optimization.leaf_modules)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module, key))
                names.setdefault(param, f"{path}.{key}" if path else key)
    for param, name in names.items():
        _check_param(name, param)
    if not any(param.numel() > 0 for param in places):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    found: list[ShardedParam] = []
    memory: dict[int, str] = {}
    for param, where in places.items():
        name = names[param]
        if param.numel() == 0:
            continue  # nothing to gather, nothing to reduce: it stays as it is
        other = memory.setdefault(param.data_ptr(), name)
        if other != name and not param.is_meta:
            raise ValueError(
                f"parameters '{other}' and '{name}' are different objects over the same memory; tie them by assigning one "
                "Parameter object to both modules"
            )
        read_dtype = param.dtype
        if config.compute_dtype is not None and param.dtype in (torch.float32, *HALF):
            read_dtype = config.compute_dtype
        persistent = config.stage < 3 or param.numel() <= config.zero_optimization.param_persistence_threshold
        found.append(
            ShardedParam(
                len(found),
                name,
                param.shape,
                param.dtype,
                read_dtype,
                param,
                tuple(where),
                persistent,
                param in leaves,
            )
        )
    return found


def _leaf_parameters(model: nn.Module, wanted: list[str]) -> set[nn.Parameter]:
    matched: dict[str, bool] = dict.fromkeys(wanted, False)
    params: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name in {path, type(module).__name__} & set(wanted):
            matched[name] = True
            params.update(module.parameters())
    missing = [name for name, hit in matched.items() if not hit]
    if missing:
        raise ValueError(
            f"config key 'zero_optimization.leaf_modules' names {missing[0]!r}, which is neither the class nor the path of "
            f"a module in {type(model).__name__}"
        )
    return params


def _check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' is lazy and has no shape yet: run the model once before it is sharded")
    if param.device.type not in ("cpu", "cuda", "meta") or param.layout != torch.strided:
        raise ValueError(
            f"parameter '{name}' is on device '{param.device}' in layout {param.layout}; strided parameters on cpu and cuda "
            "can be sharded"
        )
    if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
        raise ValueError(f"parameter '{name}' is a {type(param.data).__name__}; shard a model of plain tensors")
    if not (param.is_floating_point() or param.is_complex()) and param.requires_grad:
        raise ValueError(f"parameter '{name}' of dtype {param.dtype} requires a gradient")


_NO_HOOKS = (
    "hooks on sharded parameters would see no gradient, since autograd hands it to the reduction over the ranks. After "
    "loss.backward(), param.grad is the averaged gradient of this rank's part: change it there, before optimizer.step()"
)


class _RefuseHooks:
    """Replaces ``register_hook`` of a sharded parameter by an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, hook: Any) -> NoReturn:
        raise RuntimeError(f"a hook on parameter '{self._name}': {_NO_HOOKS}")


def _check_hooks(found: list[ShardedParam]) -> None:
    for sharded in found:
        if sharded.param._backward_hooks or sharded.param._post_accumulate_grad_hooks:
            raise ValueError(f"parameter '{sharded.name}' has a hook: {_NO_HOOKS}")


def _refuse_hooks(sharded: ShardedParam) -> None:
    sharded.param.register_hook = _RefuseHooks(sharded.name)  # type: ignore[method-assign]
    sharded.param.register_post_accumulate_grad_hook = _RefuseHooks(sharded.name)  # type: ignore[method-assign]


def _put_shard(sharded: ShardedParam, own: torch.Tensor, sharding: Sharding) -> ShardedParam:
    """Replaces a parameter without data by a new one with this rank's part."""
    own = _storage_of(sharded, own, sharding)
    param = nn.Parameter(own, requires_grad=sharded.param.requires_grad)
    param.full_shape = sharded.full_shape  # type: ignore[attr-defined]
    for module, attribute in sharded.places:
        module._parameters[attribute] = param
    if not sharding.single_rank:
        make_shard(param, sharded.name, sharded.full_shape)
    return dataclasses.replace(sharded, param=param)


def _storage_of(sharded: ShardedParam, own: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """``own`` copied to memory from which gathers are fastest, in fp32 (the master copy) if reads cast. On a single rank,
    which gathers nothing, ``own`` is only cast and moved to the device.
    """
    dtype = torch.float32 if sharded.read_dtype == sharding.config.compute_dtype else own.dtype
    if sharding.single_rank:
        return own.to(sharding.runtime.device, dtype).view(sharded.full_shape)
    return sharding.runtime.empty(own.shape, dtype).copy_(own)


def _forget_its_graph(param: nn.Parameter) -> None:
    """Makes autograd forget the shape that the parameter's gradient had before sharding. As long as a graph from before
    (a kept loss) is alive, autograd keeps that shape unless the dtype changes, so the dtype is changed for a moment.
    """
    if param.requires_grad:
        other = torch.float64 if param.dtype != torch.float64 else torch.float32
        param.data = torch.empty(0, dtype=other, device=param.device)


def _replace_by_shard(sharded: ShardedParam, sharding: Sharding) -> None:
    """Puts this rank's part, which rank 0 sends, into the parameter."""
    param = sharded.param
    whole = param.detach()
    if sharding.single_rank:
        param.data = _storage_of(sharded, whole.contiguous(), sharding)
        param.grad = None
        param.full_shape = sharded.full_shape  # type: ignore[attr-defined]
        return
    own = sharding.transfers.scatter(whole, 0, f"parameter '{sharded.name}'")
    _forget_its_graph(param)
    param.data = _storage_of(sharded, own, sharding)
    param.grad = None
    make_shard(param, sharded.name, sharded.full_shape)
