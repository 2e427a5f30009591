"""Models that are larger than one rank's memory: built without parameters, then made shard by shard.

Inside :func:`init_sharded` a parameter loses its memory as soon as a module registers it: it stays as a tensor without data
(device ``meta``), and this rank keeps its part of the value it had. :func:`deepcompile.shard` then makes each module's
parameters whole for a moment, initialises them as the module would, and keeps this rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from deepcompile import _channels

InitFunction = Callable[[nn.Module], None]

#: The attribute of a parameter without data that holds this rank's part of what it held when it was registered.
_PART = "_deepcompile_as_registered"


@contextlib.contextmanager
def init_sharded(*, process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Modules that are made inside hold no parameter data. Pass the finished model to :func:`deepcompile.shard` or
    :func:`deepcompile.initialize`, and make the optimizer after that. Values come from ``reset_parameters`` of each module,
    or from the constructor where there is none (``nn.Parameter(torch.ones(n))``), or from ``init_fn`` given to ``shard``.
    """
    from deepcompile.sharding import slice_of

    group = _channels.resolve_group(process_group)
    rank, world = group.rank(), group.size()
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            if not hasattr(module, "reset_parameters"):
                setattr(empty, _PART, slice_of(param.detach(), rank, world).clone())
            param = empty
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def make_shards(
    model: nn.Module, init_fn: InitFunction | None, group: dist.ProcessGroup
) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's part of every parameter without data. All ranks draw the same random numbers, those of rank 0's seed, so
    nothing is sent.
    """
    seeds: list[int] = [0] * group.size()
    dist.all_gather_object(seeds, torch.initial_seed(), group=group)
    parts: dict[nn.Parameter, torch.Tensor] = {}
    for index, (path, module) in enumerate(model.named_modules()):
        missing = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta and p not in parts}
        if not missing:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seeds[0] + index) % (1 << 63))
            parts.update(_make_module(path, module, missing, init_fn, group))
    return parts


def _make_module(
    path: str,
    module: nn.Module,
    missing: dict[str, nn.Parameter],
    init_fn: InitFunction | None,
    group: dist.ProcessGroup,
) -> dict[nn.Parameter, torch.Tensor]:
    from deepcompile.sharding import slice_of

    reset = getattr(module, "reset_parameters", None)
    if init_fn is None and not callable(reset):
        return {param: _part_as_registered(path, key, param) for key, param in missing.items()}
    whole = {
        key: nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad)
        for key, p in missing.items()
    }
    saved = dict(module._parameters)
    module._parameters.update(whole)
    try:
        if init_fn is not None:
            init_fn(module)
        else:
            assert callable(reset)
            reset()
    finally:
        module._parameters.update(saved)
    for key, param in missing.items():
        if init_fn is None and param._version > whole[key]._version:
            raise _changed_elsewhere(path, key)
    return {param: slice_of(whole[key].detach(), group.rank(), group.size()).clone() for key, param in missing.items()}


def _part_as_registered(path: str, key: str, param: nn.Parameter) -> torch.Tensor:
    part: torch.Tensor | None = getattr(param, _PART, None)
    name = f"{path}.{key}" if path else key
    if part is None:
        raise ValueError(
            f"parameter '{name}' is on the meta device and its module has no reset_parameters: build the model inside "
            "deepcompile.init_sharded(), or pass init_fn=... to shard"
        )
    if param._version > 0:
        raise _changed_elsewhere(path, key)
    return part


def _changed_elsewhere(path: str, key: str) -> ValueError:
    name = f"{path}.{key}" if path else key
    return ValueError(
        f"parameter '{name}' was initialised in place inside init_sharded, where it has no data, "
        "and its module's reset_parameters does not repeat that: pass init_fn=function_of_a_module to shard, which does"
    )


__all__ = ["init_sharded", "make_shards"]
