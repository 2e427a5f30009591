"""Keeps an optimizer's states in host memory while its update does not need them.

The states are updated on the device, in pieces: while one piece is updated, the next is reloaded and the one before is
offloaded. There are two kinds of schedules. *All*: every state is on the device for its update only. *Planned*: only states
for which the memory budget has no room move; they are offloaded during the forward and reloaded before the update, or stay
on the host from update to update, whichever costs less. The schedules of compiled graphs start these moves.

Whatever the schedule, the runtime ensures that a state is on the device when it is updated (``state_offload.h``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from deepcompile.config.config import Config
from deepcompile.sharding import fused_adam
from deepcompile.sharding.sharding import ShardedParam, Sharding
from deepcompile.sharding.state_moves import Moves, Schedule, offload_all

#: The update runs in about so many pieces, three of which are on the device at once. A piece has at least the bytes that
#: saturate the link to the host.
_PIECES, _LEAST_PIECE = 16, 32 << 20


def as_large(param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The states of the parameter's shape. (``step`` is left out by name: for a scalar parameter it has that shape, too.)"""
    return {
        slot: value
        for slot, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape and slot != "step"
    }


def estimated_bytes(sharded: ShardedParam) -> int:
    """Bytes of a parameter's states before they exist: two of its size, like Adam's."""
    return 2 * sharded.param.nbytes


class StateOffload:
    """Moves the states of one engine's optimizer. The calls come from the engine."""

    def __init__(self, sharding: Sharding, optimizer: torch.optim.Optimizer, config: Config) -> None:
        if sharding.offload is not None:
            raise RuntimeError(
                "another engine of this model keeps its optimizer's states on the host already: a second one cannot; leave "
                "out 'zero_optimization.offload_optimizer' and 'compile.offload_opt_states'"
            )
        self._sharding = sharding
        self._states = sharding.runtime.states
        #: The planner decides, as long as it has a plan; otherwise all states move.
        self.planned = config.compile.mode == "compile" and not sharding.single_rank and not config.offloads_all_states
        self._members = sharding.by_parameter()
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._follow(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes ``optimizer``, which may have replaced an earlier one, the optimizer whose states move."""
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_state_dict_pre_hook(lambda _: self._states.settle())
        self._optimizer = optimizer
        #: Parameters that are updated together, in the order of the updates: the same on all ranks.
        self.pieces = self._cut()
        self._learn(self._sharding.params)

    def _cut(self) -> list[list[ShardedParam]]:
        """Cuts the update into pieces. Depends on the parameters only, so that all ranks get the same pieces."""
        trained = [
            self._members[param]
            for group in self._optimizer.param_groups
            for param in group["params"]
            if param in self._members and param.requires_grad
        ]
        limit = max(_LEAST_PIECE, sum(map(estimated_bytes, trained)) // _PIECES)
        found: list[list[ShardedParam]] = [[]]
        size = 0
        for sharded in trained:
            if found[-1] and size + estimated_bytes(sharded) > limit:
                found.append([])
                size = 0
            found[-1].append(sharded)
            size += estimated_bytes(sharded)
        return found

    def bytes_planned(self, sharded: ShardedParam) -> int:
        """Bytes of the parameter's states that are on the device unless a plan moves them; estimated before they exist."""
        if not self.planned:
            return 0
        if sharded.param not in self._optimizer.state:
            return estimated_bytes(sharded)
        return sum(state.nbytes for state in as_large(sharded.param, self._optimizer.state[sharded.param]).values())

    def start_forward(self, update_follows: bool) -> None:
        """Called before the forward of every micro-batch that trains. Reloads are allowed only in the last one."""
        self._states.allow_returns(update_follows)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the first forward of a step: offloads states that something else put on the device."""
        self._follow(optimizer)
        self.skip()

    def skip(self) -> None:
        """Called in place of an update: offloads the states that are on the host between updates."""
        on_host = self.schedule().on_host
        self._move(Moves(offload=on_host, free=on_host))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, piece by piece, with the moves before and after each piece."""
        self._follow(optimizer)  # its states or parameters may have been replaced since the forward
        self._states.allow_returns(True)
        updates = self.schedule().updates
        if not any(updates) or not _steps_in_pieces(optimizer):
            self._update(optimizer, [group["params"] for group in optimizer.param_groups])
            self.skip()
            return
        for part, moves in zip(_by_piece(optimizer, self.pieces), updates, strict=False):
            self._move(moves)
            self._update(optimizer, part)
        self._move(updates[-1])

    def _update(self, optimizer: torch.optim.Optimizer, part: list[list[Any]]) -> None:
        """Updates the parameters in ``part``, a list for each group."""
        updated = [self._members[param] for params in part for param in params if param in self._members]
        self._states.require([sharded.id for sharded in updated])
        with _only(optimizer, part):
            fused_adam.step(optimizer)
        self._learn(updated)  # the first update makes the states

    def _learn(self, params: Iterable[ShardedParam]) -> None:
        """Tells the runtime which tensors are the optimizer's states now. Scalar states never move."""
        for sharded in params:
            state = self._optimizer.state.get(sharded.param, {}) if sharded.param.dim() > 0 else {}
            self._states.set(sharded.id, list(as_large(sharded.param, state).values()), sharded.name)

    def _move(self, moves: Moves) -> None:
        if moves:
            self._states.move(list(moves.offload), list(moves.free), list(moves.reload))

    def schedule(self) -> Schedule:
        if self.planned:
            step = self._sharding.planner.training_step()
            found: Schedule | None = step.plan.states if step is not None and step.plan is not None else None
            if found is not None and len(found.updates) == len(self.pieces) + 1:
                return found
        return offload_all([tuple(sharded.id for sharded in piece) for piece in self.pieces])

    def words(self) -> str:
        """For the engine's explanation."""
        schedule = self.schedule()
        trained = sum(map(len, self.pieces))
        if not schedule.moving:
            return f"on the device; there is room for those of all {trained} parameters"
        how = "as planned" if schedule.planned else "all of them"
        return (
            f"those of {len(schedule.moving)} of {trained} parameters move, {how}; "
            f"{len(schedule.on_host)} are on the host from update to update; updated in {len(self.pieces)} pieces"
        )


def _steps_in_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """True if several calls with parts of the parameters equal one call with all. PyTorch's own optimizers count steps for
    each parameter; other optimizers, and hooks, may count calls.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and fused_adam.is_unobserved(optimizer)


def _by_piece(optimizer: torch.optim.Optimizer, pieces: list[list[ShardedParam]]) -> list[list[list[Any]]]:
    """For each piece its parameters by group. Parameters of no piece (frozen, or not sharded) are in the last one."""
    piece_of = {id(sharded.param): index for index, piece in enumerate(pieces) for sharded in piece}
    parts: list[list[list[Any]]] = [[[] for _ in optimizer.param_groups] for _ in pieces]
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            parts[piece_of.get(id(param), len(pieces) - 1)][index].append(param)
    return parts


@contextlib.contextmanager
def _only(optimizer: torch.optim.Optimizer, part: list[list[Any]]) -> Iterator[None]:
    """Inside, the optimizer's groups contain only the parameters in ``part``."""
    all_params = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, part, strict=True):
            group["params"] = params
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_params, strict=True):
            group["params"] = params
