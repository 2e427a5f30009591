"""Models that are larger than one rank's memory: built without parameter data, then initialised module by module.

Inside :func:`init_sharded` a parameter loses its memory as soon as a module registers it: it becomes a tensor without data
(device ``meta``), and this rank keeps a copy of its part of the value. Later :func:`deepcompile.shard` allocates one
module's whole parameters at a time, initialises them as the module would, and keeps this rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from deepcompile.runtime.group_transfers import slice_of
from deepcompile.runtime.process_group import resolve_or_make

InitFunction = Callable[[nn.Module], None]

#: Attribute of a parameter without data: this rank's part of the value that the parameter had when it was registered.
_PART = "_deepcompile_as_registered"
#: Attribute of a parameter without data: how often the program has written to it since. (Such writes are lost.)
_WRITES = "_deepcompile_writes"


class _Writes(TorchFunctionMode):
    """Counts in-place operations on the watched tensors, also through ``param.data``, which version counters miss."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, torch.Tensor] = {}  # by the address of the storage, which the tensor keeps alive

    def watch(self, tensor: torch.Tensor) -> None:
        setattr(tensor, _WRITES, 0)
        self._watched[tensor.untyped_storage()._cdata] = tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        if writes:
            for tensor in (*args, *(kwargs or {}).values()):
                if isinstance(tensor, torch.Tensor):
                    found = self._watched.get(tensor.untyped_storage()._cdata)
                    if found is not None:
                        setattr(found, _WRITES, getattr(found, _WRITES) + 1)
                    break  # only the first tensor argument is written to
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def init_sharded(*, process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Modules that are made inside hold no parameter data. Pass the finished model to :func:`deepcompile.shard` or
    :func:`deepcompile.initialize`, and make the optimizer after that. Values come from each module's ``reset_parameters``,
    then from the ``init_fn`` passed to ``shard``; a parameter that neither sets keeps the constructor's value
    (``nn.Parameter(torch.ones(n))``).
    """
    group = resolve_or_make(process_group)
    rank, world = group.rank(), group.size()
    original = nn.Module.register_parameter
    writes = _Writes()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            setattr(empty, _PART, slice_of(param.detach(), rank, world).clone())
            writes.watch(empty)
            param = empty
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with writes:
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def make_shards(
    model: nn.Module, init_fn: InitFunction | None, group: dist.ProcessGroup, device: torch.device
) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's part of every parameter without data. All ranks draw the same random numbers, from rank 0's seed, so no
    values are communicated. The random states of the CPU and of ``device`` are restored afterwards.
    """
    seeds: list[int] = [0] * group.size()
    dist.all_gather_object(seeds, torch.initial_seed(), group=group)
    parts: dict[nn.Parameter, torch.Tensor] = {}
    for index, (path, module) in enumerate(model.named_modules()):
        missing = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta and p not in parts}
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not missing and not buffers:
            continue
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed((seeds[0] + index) % (1 << 63))
            parts.update(_make_module(path, module, missing, buffers, init_fn, group, device))
    return parts


def _make_module(
    path: str,
    module: nn.Module,
    missing: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    init_fn: InitFunction | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[nn.Parameter, torch.Tensor]:
    reset = getattr(module, "reset_parameters", None)
    whole = {key: nn.Parameter(_unset(p), requires_grad=p.requires_grad) for key, p in missing.items()}
    saved = dict(module._parameters)
    module._parameters.update(whole)
    filled = {key: torch.zeros_like(b, device=device) for key, b in buffers.items()}
    module._buffers.update(filled)
    writes = _Writes()
    for tensor in (*whole.values(), *filled.values()):
        writes.watch(tensor)
    try:
        with writes:
            if callable(reset):
                reset()
            if init_fn is not None:
                init_fn(module)
    finally:
        module._parameters.update(saved)
    for key, buffer in filled.items():
        if module._buffers[key] is buffer and getattr(buffer, _WRITES) == 0:
            raise ValueError(
                f"buffer '{_name(path, key)}' is on the meta device and neither reset_parameters of its module nor init_fn "
                "sets it: build the model inside deepcompile.init_sharded(), where buffers have data, or pass init_fn=..."
            )
    result = {}
    for key, param in missing.items():
        if not _was_set(whole[key]):
            result[param] = _part_as_registered(path, key, param)
        elif init_fn is None and getattr(param, _WRITES, 0) > getattr(whole[key], _WRITES):
            raise _changed_elsewhere(path, key)
        else:
            result[param] = slice_of(whole[key].detach(), group.rank(), group.size()).clone()
        vars(param).pop(_PART, None)  # frees its memory
    return result


def _unset(param: nn.Parameter) -> torch.Tensor:
    value = torch.empty_like(param, device="cpu", requires_grad=False)
    return value.fill_(float("nan")) if value.is_floating_point() or value.is_complex() else value.zero_()


def _was_set(param: nn.Parameter) -> bool:
    if param.is_floating_point() or param.is_complex():
        return param.numel() == 0 or not bool(param.detach().isnan().all())
    return bool(getattr(param, _WRITES))


def _name(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _part_as_registered(path: str, key: str, param: nn.Parameter) -> torch.Tensor:
    part: torch.Tensor | None = getattr(param, _PART, None)
    if part is None:
        raise ValueError(
            f"parameter '{_name(path, key)}' is on the meta device and neither reset_parameters of its module nor init_fn "
            "sets it: build the model inside deepcompile.init_sharded(), or pass init_fn=... to shard"
        )
    if getattr(param, _WRITES, 0) > 0:
        raise _changed_elsewhere(path, key)
    return part


def _changed_elsewhere(path: str, key: str) -> ValueError:
    return ValueError(
        f"parameter '{_name(path, key)}' was initialised in place inside init_sharded, where it has no data, "
        "and its module's reset_parameters does not repeat that: pass init_fn=function_of_a_module to shard, which does"
    )
