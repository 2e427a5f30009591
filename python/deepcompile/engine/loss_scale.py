"""The loss scale of fp16 training: fixed, or halved at an overflow and doubled after a while without one."""

from __future__ import annotations

from typing import Any

from deepcompile.config.config import FP16Config


class LossScale:
    def __init__(self, config: FP16Config) -> None:
        self._config = config
        self.dynamic = config.enabled and config.loss_scale == 0
        self.value = 1.0
        if config.enabled:
            self.value = config.loss_scale or 2.0**config.initial_scale_power
        self._good_steps = 0
        self._tolerated = config.hysteresis - 1  # overflows that do not yet lower the scale

    def update(self, overflow: bool) -> None:
        """After a step that was taken, or skipped because of an overflow."""
        if not self.dynamic:
            return
        if overflow:
            if self._tolerated > 0:
                self._tolerated -= 1
            else:
                self.value = max(self.value / 2, self._config.min_loss_scale)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self.value = min(self.value * 2, 2.0**126)
            self._good_steps = 0
            self._tolerated = self._config.hysteresis - 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps, "tolerated": self._tolerated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.dynamic:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
            self._tolerated = int(state.get("tolerated", 0))
