"""Where a learning-rate schedule and its optimizer's settings stand, to go back to when an update turns out not to have
happened.
"""

from __future__ import annotations

from typing import Any

import torch


class ScheduleState:
    """Taken before ``scheduler.step()``. A schedule replaces the values of its state, and so do the settings of a group,
    but for learning rates that are tensors: those are written to.
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
