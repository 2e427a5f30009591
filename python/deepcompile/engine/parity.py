"""Trains a model sharded and unsharded and reports the largest differences by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from deepcompile.config.config import Config, load_config
from deepcompile.engine.initialization import initialize
from deepcompile.runtime import channels
from deepcompile.runtime.group_transfers import GroupTransfers, slice_of
from deepcompile.sharding.unsharded import full_state_dict

LossOf = Callable[[nn.Module, Any], torch.Tensor]


@dataclasses.dataclass
class Difference:
    """The largest relative difference of one kind, and where it is."""

    value: float = 0.0
    where: str = ""

    def see(self, value: float, where: str) -> None:
        if not value <= self.value:  # true for NaN, too
            self.value, self.where = value, where


@dataclasses.dataclass
class Parity:
    loss: Difference
    gradient: Difference
    parameter: Difference

    @property
    def largest(self) -> float:
        return max(self.loss.value, self.gradient.value, self.parameter.value)

    def __str__(self) -> str:
        rows = (("loss", self.loss), ("gradient", self.gradient), ("parameter", self.parameter))
        return "\n".join(f"{name:<10} {d.value:.2e}  {d.where}" for name, d in rows)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().clamp_min(1e-12)
    return float(((found.to(expected.dtype) - expected).abs().max() / scale).item())


def _on_host(batch: Any) -> tuple[Any, Any]:
    """The batch in host memory, to be sent to ranks on other devices, and which of its tensors were on a device."""
    moved = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, batch)
    return moved, pytree.tree_map(lambda leaf: isinstance(leaf, torch.Tensor) and not leaf.is_cpu, batch)


def _on_device(batch: Any, was_on_device: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf, moves: leaf.to(device) if moves else leaf, batch, was_on_device)


def check_parity(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    steps: int = 3,
    *,
    loss_fn: LossOf | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Parity:
    """Trains ``model_fn()`` for some steps of SGD, sharded as ``config`` says and unsharded on the batches of all ranks in
    sequence, and compares. ``batch`` is this rank's: a tensor, or a tuple or dict of arguments; ``loss_fn(model, batch)``
    gives the loss where the model does not return it. Every rank calls it; dropout must be off.
    """
    checked = load_config(config)
    if isinstance(model_fn, nn.Module):
        raise TypeError(f"check_parity takes a function that makes the model, not the {type(model_fn).__name__} itself")
    group = channels.resolve_group(process_group)
    rank, world = group.rank(), group.size()
    loss_of = loss_fn or _default_loss
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_parity: model_fn returned a {type(model).__name__}, not a torch.nn.Module")
    whole = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    transfers = GroupTransfers(group, checked.timeout)
    transfers.meet("is about to check parity")
    for tensor in whole if world > 1 else ():
        if tensor.numel() > 0:
            transfers.broadcast(tensor, 0, "the model")
    reference = model_fn()
    with torch.no_grad():
        for tensor, value in zip((*reference.parameters(), *reference.buffers()), whole, strict=True):
            tensor.copy_(value)
    batches: list[Any] = [None] * world
    dist.all_gather_object(batches, _on_host(batch), group=group)
    device = whole[0].device if whole else torch.device("cpu")
    batches = [_on_device(one, was_on_device, device) for one, was_on_device in batches]

    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=1e-2), checked, process_group=group)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2)
    result = Parity(Difference(), Difference(), Difference())
    accumulation = engine.gradient_accumulation_steps()
    shards = {sharded.name: sharded.param for sharded in engine.sharding.params}
    for step in range(steps):
        for _ in range(accumulation):
            losses = [loss_of(reference, one) for one in batches]
            (torch.stack(losses).sum() / (world * accumulation)).backward()  # type: ignore[no-untyped-call]
            loss = loss_of(engine, batch)  # type: ignore[arg-type]
            result.loss.see(_relative(loss.detach(), losses[rank].detach()), f"step {step}")
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                for name, param in reference.named_parameters():
                    if name in shards and param.grad is not None:
                        own = slice_of(param.grad * engine.loss_scale.value, rank, world)
                        found = shards[name].grad
                        difference = float("inf") if found is None else _relative(found.view(-1), own)
                        result.gradient.see(difference, f"{name}, step {step}")
                if checked.gradient_clipping:
                    torch.nn.utils.clip_grad_norm_(reference.parameters(), checked.gradient_clipping)
                optimizer.step()
                optimizer.zero_grad()
            engine.step()
    found_state = full_state_dict(model)
    for name, value in reference.named_parameters():
        result.parameter.see(_relative(found_state[name], value.detach()), name)
    engine.close()
    results: list[Any] = [None] * world
    dist.all_gather_object(results, result, group=group)
    for other in results:
        for kind in ("loss", "gradient", "parameter"):
            getattr(result, kind).see(getattr(other, kind).value, getattr(other, kind).where)
    return result


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    floats = [leaf for leaf in pytree.tree_leaves(loss) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not floats:
        raise ValueError("check_parity: the model returns no loss; pass loss_fn=lambda model, batch: ...")
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()
