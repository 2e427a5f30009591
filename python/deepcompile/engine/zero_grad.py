"""Tells engines of every ``zero_grad``. Within an accumulation the gradients are in the runtime's buffers, which clearing
``param.grad`` would not reach.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepcompile.engine.engine import Engine

#: Engines that are told; each counts its micro-batches.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def watch_zero_grad(engine: Engine) -> None:
    """From now on the engine is told when an optimizer or a module clears gradients."""
    _wrap_zero_grad()
    _engines.add(engine)


@functools.cache
def _wrap_zero_grad() -> None:
    def tells_engines(kind: Any, params: Callable[[Any], list[torch.Tensor]]) -> None:
        inner = kind.zero_grad

        @functools.wraps(inner)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            inner(self, *args, **kwargs)
            for engine in sorted(_engines, key=lambda engine: engine.sharding.graph_id):
                if engine.gradients_pending:
                    engine.note_zero_grad(params(self))

        kind.zero_grad = zero_grad

    tells_engines(torch.optim.Optimizer, lambda optimizer: [p for g in optimizer.param_groups for p in g["params"]])
    tells_engines(torch.nn.Module, lambda module: list(module.parameters()))
