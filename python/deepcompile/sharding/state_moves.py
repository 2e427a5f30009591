"""When an optimizer's states move between device and host: either all of them around each update, or as a plan decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepcompile import plan as planner


@dataclasses.dataclass(frozen=True)
class Moves:
    """The moves of states at one point, in this order, by the ids of their parameters."""

    offload: tuple[int, ...] = ()  # start D2H
    free: tuple[int, ...] = ()  # free the device copy
    reload: tuple[int, ...] = ()  # start H2D

    def __bool__(self) -> bool:
        return bool(self.offload or self.free or self.reload)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """``updates``: the moves before each piece of the update, and those after the last. ``on_host``: parameters whose states
    are on the host from update to update. ``moving``: parameters whose states move at all, around the update or in graphs.
    """

    updates: tuple[Moves, ...]
    on_host: tuple[int, ...]
    moving: frozenset[int]
    planned: bool = False


def offload_all(pieces: Sequence[tuple[int, ...]]) -> Schedule:
    """Moves all states: each piece is reloaded while the piece before it is updated, and offloaded while the next one is."""
    count = len(pieces)

    def piece(index: int) -> tuple[int, ...]:
        return pieces[index] if 0 <= index < count else ()

    updates = [Moves(piece(i - 1), piece(i - 2), (*(piece(0) if i == 0 else ()), *piece(i + 1))) for i in range(count)]
    updates.append(Moves(piece(count - 1), (*piece(count - 2), *piece(count - 1))))
    ids = tuple(i for own in pieces for i in own)
    return Schedule(tuple(updates), on_host=ids, moving=frozenset(ids))


def placed_moves(planned: planner.Plan, ids: Sequence[int]) -> list[Moves]:
    """The plan's moves of optimizer states before each node, and after the last. ``ids``: the runtime's id of each of the
    graph's parameters.
    """
    found: list[dict[str, list[int]]] = [
        {"offload": [], "free": [], "reload": []} for _ in range(len(planned.graph) + 1)
    ]
    leaving: dict[int | None, list[int]] = {}  # states whose offload has started, by its operation
    following = 0
    for kind, node, operation, items in planned.instructions:  # (only compute instructions have a node)
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
    """The schedule with these moves. ``moves``: all of the step, in order; ``updates``: the last of them, around the update.
    A state whose first move is a reload is on the host when the step begins.
    """
    first: dict[int, str] = {}
    for one in moves:
        for name in ("offload", "reload"):
            for state in getattr(one, name):
                first.setdefault(state, name)
    on_host = tuple(state for state, name in first.items() if name == "reload")
    return Schedule(tuple(updates), on_host, frozenset(first), planned=True)
