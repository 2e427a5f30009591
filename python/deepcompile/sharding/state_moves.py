"""When an optimizer's states move between device and host: each visits the device for its update, or as a plan has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepcompile import plan as planner


@dataclasses.dataclass(frozen=True)
class Moves:
    """What happens to states at one point, in this order, by the ids of their parameters."""

    offload: tuple[int, ...] = ()  # start D2H
    free: tuple[int, ...] = ()  # free the device copy
    reload: tuple[int, ...] = ()  # start H2D

    def __bool__(self) -> bool:
        return bool(self.offload or self.free or self.reload)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """``updates``: the moves before each piece of the update, and those behind the last. ``on_host``: whose states are on
    the host from update to update. ``moving``: who moves at all, here or in the graphs.
    """

    updates: tuple[Moves, ...]
    on_host: tuple[int, ...]
    moving: frozenset[int]
    planned: bool = False


def offload_all(pieces: Sequence[tuple[int, ...]]) -> Schedule:
    """Each piece arrives while the one before it is updated, and leaves while the one behind it is."""
    count = len(pieces)

    def piece(index: int) -> tuple[int, ...]:
        return pieces[index] if 0 <= index < count else ()

    updates = [Moves(piece(i - 1), piece(i - 2), (*(piece(0) if i == 0 else ()), *piece(i + 1))) for i in range(count)]
    updates.append(Moves(piece(count - 1), (*piece(count - 2), *piece(count - 1))))
    home = tuple(i for own in pieces for i in own)
    return Schedule(tuple(updates), home, frozenset(home))


def placed_moves(planned: planner.Plan, ids: Sequence[int]) -> list[Moves]:
    """What the plan does to the optimizer's states before each node, and behind the last. ``ids``: by which the runtime
    knows the graph's parameters.
    """
    found: list[dict[str, list[int]]] = [
        {"offload": [], "free": [], "reload": []} for _ in range(len(planned.graph) + 1)
    ]
    leaving: dict[int | None, list[int]] = {}  # by operation
    following = 0
    for kind, node, operation, items in planned.instructions:  # only what computes has a node
        states = [ids[param] for item, param in items if item == "state"]
        if node is not None:
            following = node + 1
        elif kind == "offload":
            leaving[operation] = states
            found[following]["offload"] += states
        elif kind == "reload":
            found[following]["reload"] += states
        elif kind == "wait":
            found[following]["free"] += leaving.pop(operation, [])
    return [Moves(**{name: tuple(ids) for name, ids in moves.items()}) for moves in found]


def state_schedule(moves: Sequence[Moves], updates: Sequence[Moves]) -> Schedule:
    """``moves``: of the whole step, in order; ``updates``: those of them that are around the update."""
    first: dict[int, str] = {}
    for one in moves:
        for name in ("offload", "reload"):
            for state in getattr(one, name):
                first.setdefault(state, name)
    on_host = tuple(state for state, name in first.items() if name == "reload")
    return Schedule(tuple(updates), on_host, frozenset(first), planned=True)
