"""A copy of a learning-rate schedule's state and of its optimizer's settings, to restore if the device skips an update."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleState:
    """Copied before ``scheduler.step()``, which replaces the values in its state dict and in the optimizer's groups. (Only
    learning rates that are tensors are written in place, so those are cloned.)
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._state = scheduler.state_dict()
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in saved.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
