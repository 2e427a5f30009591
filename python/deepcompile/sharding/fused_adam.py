"""The update of ``Adam`` and ``AdamW`` with ``fused=True``, without what PyTorch's ``step`` does around its kernel.

``step`` walks through all parameters in Python, sorts them by device and dtype, and, where an update may turn out not to
happen, counts every parameter's step up before it and down after it. That takes the host longer than the kernels take a
device. Here the parameters are sorted once and the same kernels get the same numbers: the bits are those of
``optimizer.step()``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from deepcompile.sharding import shard_aware_torch


def step(optimizer: Any) -> None:
    """``optimizer.step()``, by the short way where that does the same."""
    updates = _updates(optimizer) if _is_plain(optimizer) else None
    if updates is None:
        optimizer.step()
        return
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    counted = 1 if found_inf is None else 1 - found_inf
    with torch.no_grad(), torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for update in updates:
            group, params = optimizer.param_groups[update.batch.group], update.batch.params
            steps = [state["step"] for state in update.states]
            torch._foreach_add_(steps, counted)
            beta1, beta2 = group["betas"]
            kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_  # type: ignore[attr-defined]
            kernel(
                params,
                update.gradients,
                [state["exp_avg"] for state in update.states],
                [state["exp_avg_sq"] for state in update.states],
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=scale,
                found_inf=found_inf,
            )
            shard_aware_torch.note_update(params)
    optimizer._opt_called = True  # what schedulers ask


def _inside_of_hooks(step: Any) -> Any:
    """PyTorch puts a function that calls hooks around a class's step when the first of its objects is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_STEPS = {kind: _inside_of_hooks(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}


def _is_plain(optimizer: Any) -> bool:
    """True where nobody else looks at the step, and all of it is one kernel's work."""
    kind = type(optimizer)
    return kind in _STEPS and _inside_of_hooks(kind.step) is _STEPS[kind] and is_unobserved(optimizer)


def is_unobserved(optimizer: Any) -> bool:
    """True where nobody else could notice how often ``optimizer.step()`` is called, and with what."""
    replaced = optimizer.__dict__.get("step")
    # A scheduler's only notes the call.
    noted = getattr(replaced, "_wrapped_by_lr_sched", False) and replaced.__wrapped__ is type(optimizer).step
    return (
        (replaced is None or noted)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and shard_aware_torch.are_the_only_hooks()
    )


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What one kernel updates: parameters of one group, dtype and device."""

    group: int
    places: list[int]  # in the group
    states: list[int]  # places in the optimizer's state
    params: list[Any]
    dtype: torch.dtype
    device: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an optimizer's parameters fall into batches, for as long as ``key`` is the same. Its states are not kept, so that
    others can take their place in memory. ``kept``: no other object gets the identity of a parameter that the key names.
    """

    key: Any
    kept: list[list[Any]]
    batches: list[_Batch]


#: Where an optimizer keeps its layouts, by the first of the parameters that it was stepped with (pieces of all of them,
#: where states are offloaded): what points from there back to the optimizer is found by the collector of cycles.
_LAYOUTS = "_deepcompile_layouts"
_MOST_LAYOUTS = 64


def _updates(optimizer: Any) -> list[_Update] | None:
    """None where ``step`` must do it, as for the first update of a parameter."""
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["differentiable"]:
            return None
        if any(isinstance(number, torch.Tensor) for number in (group["lr"], *group["betas"])):
            return None
    gradients = [[param.grad for param in group["params"]] for group in optimizer.param_groups]
    missing = [[place for place, gradient in enumerate(own) if gradient is None] for own in gradients]
    params = [list(map(id, group["params"])) for group in optimizer.param_groups]
    key = params, missing, list(map(id, optimizer.state))
    layouts = optimizer.__dict__.setdefault(_LAYOUTS, {})
    first = next((param for own in params for param in own), None)
    layout = layouts.get(first)
    if layout is None or layout.key != key:
        batches = _batches(optimizer, gradients)
        if batches is None:
            return None
        shard_aware_torch.before_update(optimizer)
        layout = _Layout(key, [list(group["params"]) for group in optimizer.param_groups], batches)
        if len(layouts) == _MOST_LAYOUTS:  # of pieces that are no longer
            layouts.clear()
        layouts[first] = layout
    states = list(optimizer.state.values())
    updates = [
        _Update(
            batch,
            [gradients[batch.group][place] for place in batch.places],
            [states[place] for place in batch.states],
        )
        for batch in layout.batches
    ]
    if not all(update.fits() for update in updates):
        del layouts[first]
        return None
    return updates


@dataclasses.dataclass(frozen=True)
class _Update:
    batch: _Batch
    gradients: list[torch.Tensor]
    states: list[dict[str, Any]]

    def fits(self) -> bool:
        batch = self.batch
        return (
            {gradient.dtype for gradient in self.gradients} == {batch.dtype}
            and {gradient.get_device() for gradient in self.gradients} == {batch.device}
            and not any(gradient.is_sparse for gradient in self.gradients)
            and all(self.states)
        )


def _batches(optimizer: Any, gradients: list[list[Any]]) -> list[_Batch] | None:
    """None where a parameter has no state yet, or the parameters are on several devices: the loss scale is on one."""
    places_of_states = {id(param): place for place, param in enumerate(optimizer.state)}
    found: dict[Any, _Batch] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if gradients[index][place] is None:
                continue
            state = places_of_states.get(id(param))
            if state is None:
                return None
            kind = index, param.dtype, param.device
            batch = found.setdefault(kind, _Batch(index, [], [], [], param.dtype, param.get_device()))
            batch.places.append(place)
            batch.states.append(state)
            batch.params.append(param)
    return list(found.values()) if len({device for _, _, device in found}) <= 1 else None
