"""Before an update: undoes the loss scale, clips by the global norm, and finds gradients that are not finite.

On CPU, and for optimizers that are not fused, the host reads the norm and decides. On CUDA reading the norm would block the
host in every step. So for a fused optimizer the device decides: the optimizer's kernel divides gradients by ``grad_scale``
and does nothing if ``found_inf`` is set. The host learns of a skipped update when it calls
:meth:`Clipping.pop_late_skip`, at the next step at the latest.
"""

from __future__ import annotations

from typing import Any

import torch

from deepcompile.sharding.shard_aware_torch import total_norm_over_shards
from deepcompile.sharding.sharding import Sharding


class Clipping:
    def __init__(self, sharding: Sharding, limit: float) -> None:
        self._sharding = sharding
        self._limit = limit
        self._norm: torch.Tensor | float | None = None
        self._skipped = LateFlag(sharding.runtime.device) if sharding.runtime.device.type == "cuda" else None

    @property
    def norm(self) -> float | None:
        """The global norm of the last gradients, before clipping; None before the first."""
        return self._norm.item() if isinstance(self._norm, torch.Tensor) else self._norm

    def apply(self, optimizer: Any, scale: float, must_know: bool) -> bool:
        """False, on all ranks alike, when the gradients are not finite and the update must not happen. ``scale``: the loss
        scale. ``must_know``: the caller needs the answer now. Otherwise True may mean that the device has yet to decide;
        then :meth:`pop_late_skip` gives the answer.
        """
        gradients = [grad for s in self._sharding.params if (grad := s.param.grad) is not None]
        norm = total_norm_over_shards(gradients, 2.0, self._sharding)
        if self._skipped is not None and not must_know and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._let_device_decide(optimizer, norm, scale)
            return True
        value = norm.item() / scale
        self._norm = value
        if value != value or value == float("inf"):
            return False
        factor = 1 / scale
        if self._limit > 0:
            factor *= min(1.0, self._limit / (value + 1e-6))
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return True

    def _let_device_decide(self, optimizer: Any, norm: torch.Tensor, scale: float) -> None:
        if scale != 1.0:
            norm = norm / scale
        self._norm = norm
        if self._limit > 0:
            optimizer.grad_scale = (((norm + 1e-6) / self._limit).clamp(min=1.0) * scale).float()
        elif scale != 1.0:
            optimizer.grad_scale = torch.full_like(norm, scale, dtype=torch.float32)
        zero = norm * 0  # NaN if the norm is not finite
        optimizer.found_inf = zero.ne(zero).float()  # NaN != NaN, so this sets found_inf
        assert self._skipped is not None
        self._skipped.send(optimizer.found_inf)

    def done(self, optimizer: Any) -> None:
        """After the update: removes ``grad_scale`` and ``found_inf``, which held for this update only."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)

    @property
    def decides_late(self) -> bool:
        """True when the last :meth:`apply` left the decision to the device and :meth:`pop_late_skip` has not read it yet."""
        return self._skipped is not None and self._skipped.sent

    def pop_late_skip(self) -> bool:
        """True once if the device skipped the update for which :meth:`apply` returned True. Waits for the device if it has
        not decided yet.
        """
        return self._skipped is not None and self._skipped.pop()


class LateFlag:
    """Copies a flag from the device to the host. The host waits for that copy alone, not for work enqueued after it."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros((), pin_memory=on_cuda, device="cpu")
        self._arrived = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.sent = False

    def send(self, flag: torch.Tensor) -> None:
        self._host.copy_(flag, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self.sent = True

    def pop(self) -> bool:
        if not self.sent:
            return False
        if self._arrived is not None:
            self._arrived.synchronize()  # does not block when called at the next step: the copy was enqueued long before
        self.sent = False
        return bool(self._host.item())
