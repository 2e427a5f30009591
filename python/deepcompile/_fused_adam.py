"""The update of ``Adam`` and ``AdamW`` with ``fused=True``, without what PyTorch's ``step`` does around its kernel.

``step`` walks through all parameters in Python, sorts them by device and dtype, and, where an update may turn out not to
happen, counts every parameter's step up before it and down after it. That takes the host longer than the kernels take a
device. Here the same kernels get the same numbers: the bits are those of ``optimizer.step()``.
"""

from __future__ import annotations

from typing import Any

import torch

from deepcompile import _shard_aware_torch


def step(optimizer: Any) -> None:
    """``optimizer.step()``, by the short way where that does the same."""
    batches = _batches(optimizer) if _is_plain(optimizer) else None
    if batches is None:
        optimizer.step()
        return
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    counted = 1 if found_inf is None else 1 - found_inf
    with torch.no_grad(), torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        _shard_aware_torch.before_update(optimizer)
        for group, params, states in batches:
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, counted)
            beta1, beta2 = group["betas"]
            kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_  # type: ignore[attr-defined]
            kernel(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
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
        _shard_aware_torch.after_update(optimizer)
    optimizer._opt_called = True  # what schedulers ask


def _inside_of_hooks(step: Any) -> Any:
    """PyTorch puts a function that calls hooks around a class's step when the first of its objects is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_STEPS = {kind: _inside_of_hooks(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}


def _is_plain(optimizer: Any) -> bool:
    """True where nobody else looks at the step, and all of it is one kernel's work."""
    kind = type(optimizer)
    replaced = optimizer.__dict__.get("step")
    # A scheduler's only notes the call.
    noted = getattr(replaced, "_wrapped_by_lr_sched", False) and replaced.__wrapped__ is kind.step
    return (
        kind in _STEPS
        and _inside_of_hooks(kind.step) is _STEPS[kind]
        and (replaced is None or noted)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and _shard_aware_torch.are_the_only_hooks()
    )


def _batches(optimizer: Any) -> list[tuple[dict[str, Any], list[Any], list[dict[str, Any]]]] | None:
    """What one kernel updates: parameters of one group and dtype, with their states. None where ``step`` must do it, as
    for the first update of a parameter.
    """
    found = []
    devices: set[torch.device] = set()
    state = optimizer.state
    for group in optimizer.param_groups:
        numbers = (group["lr"], *group["betas"])
        if not group["fused"] or group["amsgrad"] or group["differentiable"]:
            return None
        if any(isinstance(number, torch.Tensor) for number in numbers):
            return None
        by_kind: dict[Any, list[Any]] = {}
        for param in group["params"]:
            if param.grad is not None:
                by_kind.setdefault((param.dtype, param.device), []).append(param)
        devices.update(device for _, device in by_kind)
        for params in by_kind.values():
            states = [state.get(param) for param in params]
            if not all(states):
                return None
            if any(param.grad.is_sparse or param.grad.dtype != param.dtype for param in params):
                return None
            found.append((group, params, states))
    return found if len(devices) <= 1 else None  # the loss scale is on one of them


__all__ = ["step"]
