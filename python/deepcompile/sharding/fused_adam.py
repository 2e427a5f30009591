"""The update of ``Adam`` and ``AdamW`` with ``fused=True``, without the host work of PyTorch's ``step``.

PyTorch's ``step`` walks through all parameters in Python, sorts them by device and dtype, and, with ``found_inf``, counts
every parameter's step up before the kernel and down after it. That takes the host longer than the kernels take the device.
Here the parameters are sorted once. The same kernels get the same numbers, so the result has the bits of
``optimizer.step()``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from deepcompile.sharding import shard_aware_torch


def step(optimizer: Any) -> None:
    """``optimizer.step()``; calls the fused kernels directly if that has the same effect."""
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
    optimizer._opt_called = True  # schedulers warn if it is missing


def _inside_of_hooks(step: Any) -> Any:
    """The class's own ``step``. PyTorch wraps it in a function that calls hooks when the first object is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_STEPS = {kind: _inside_of_hooks(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}


def _is_plain(optimizer: Any) -> bool:
    """True if ``optimizer.step`` is PyTorch's own and nothing else observes it."""
    kind = type(optimizer)
    return kind in _STEPS and _inside_of_hooks(kind.step) is _STEPS[kind] and is_unobserved(optimizer)


def is_unobserved(optimizer: Any) -> bool:
    """True if no hook and no wrapper but ours observes how often ``optimizer.step()`` is called, and with which
    parameters.
    """
    replaced = optimizer.__dict__.get("step")
    # A scheduler's wrapper only notes that step was called.
    noted = getattr(replaced, "_wrapped_by_lr_sched", False) and replaced.__wrapped__ is type(optimizer).step
    return (
        (replaced is None or noted)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and shard_aware_torch.are_the_only_hooks()
    )


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The parameters that one kernel updates: of one group, dtype and device."""

    group: int
    places: list[int]  # indices in the group
    states: list[int]  # indices in the optimizer's state dict, in its order
    params: list[Any]
    dtype: torch.dtype
    device: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The batches of an optimizer, valid while ``key`` is the same. It keeps no reference to states, so that offloading can
    free them. ``kept`` holds references to the parameters, so that no new object can get an ``id()`` that the key contains.
    """

    key: Any
    kept: list[list[Any]]
    batches: list[_Batch]


#: The optimizer's attribute that holds its layouts, by the first parameter of each update (with offloaded states, an update
#: runs in pieces, and each piece has a layout). An attribute, so that the garbage collector can free cycles through it.
_LAYOUTS = "_deepcompile_layouts"
_MOST_LAYOUTS = 64


def _updates(optimizer: Any) -> list[_Update] | None:
    """None if ``optimizer.step()`` itself must run, for example because a parameter has no state yet."""
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
        if len(layouts) == _MOST_LAYOUTS:  # most belong to pieces of an earlier partition
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
    """None if a parameter has no state yet, or the parameters are on several devices (``grad_scale`` is on one)."""
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
