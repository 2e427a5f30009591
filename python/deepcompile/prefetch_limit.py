"""A plan whose gathers are started at most so many layers ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepcompile import plan as planner
from deepcompile.segments import Segments


def limit_prefetch(
    graph: planner.StepGraph,
    machine: planner.Machine,
    planned: planner.Plan,
    graphs: Mapping[str, Segments],
    ahead: int,
) -> planner.Plan:
    """``planned`` with every gather at most ``ahead`` segments before its first use; gathers whose uses lie further apart
    are split. Proved and simulated again: starting later never takes more memory.
    """
    uses = [set(segment.uses) for segments in graphs.values() for segment in segments.segments]
    slots, waits, gathers, head = _read(planned)
    moved: dict[int, list[str]] = {}
    moved_waits: dict[int, list[str]] = {}
    replaced: set[str] = set()
    for name, start, params in gathers:
        chunks = list(_chunks([(_first_use(uses, param, start), param) for param in params], ahead))
        if len(chunks) == 1 and max(use for use, _ in chunks[0]) - ahead <= start:
            continue
        replaced.add(name)
        for number, chunk in enumerate(chunks):
            first, last = min(use for use, _ in chunk), max(use for use, _ in chunk)
            where = max(start, last - ahead)
            part = f"{name}_{number}"
            moved.setdefault(where, []).append(f"gather {part} {' '.join(param for _, param in chunk)}")
            moved_waits.setdefault(first, []).append(f"wait {part}")
    if not replaced:
        return planned
    lines = list(head)
    for position, slot in enumerate(slots):
        body, node = slot[:-1], slot[-1]
        lines += [line for line in body if not (line.split()[0] in ("gather", "wait") and line.split()[1] in replaced)]
        lines += moved.get(position, []) + moved_waits.get(position, []) + [node]
    return planner.load_plan(graph, machine, "\n".join([*lines, *waits]) + "\n")


def _read(planned: planner.Plan) -> tuple[list[list[str]], list[str], list[tuple[str, int, list[str]]], list[str]]:
    """The plan's lines by the node that they come before (which is the last of each), those behind the last node, its
    gathers with the position before which they start, and its first lines.
    """
    head: list[str] = []
    slots: list[list[str]] = []
    gathers: list[tuple[str, int, list[str]]] = []
    current: list[str] = []
    for whole in planned.text.splitlines():
        line = whole.split("#")[0].strip()
        words = line.split()
        if not words:
            continue
        if words[0] in ("plan", "budget", "start"):
            head.append(line)
            continue
        current.append(line)
        if words[0] == "gather":
            gathers.append((words[1], len(slots), words[2:]))
        elif words[0] in ("compute", "optimizer"):
            slots.append(current)
            current = []
    return slots, current, gathers, head


def _first_use(uses: Sequence[set[str]], param: str, start: int) -> int:
    return next((position for position in range(start, len(uses)) if param in uses[position]), start)


def _chunks(members: list[tuple[int, str]], ahead: int) -> Iterator[list[tuple[int, str]]]:
    """In order of use, cut where two uses are more than ``ahead`` apart."""
    chunk: list[tuple[int, str]] = []
    for use, param in sorted(members, key=lambda member: member[0]):
        if chunk and use - chunk[0][0] > ahead:
            yield chunk
            chunk = []
        chunk.append((use, param))
    if chunk:
        yield chunk


__all__ = ["limit_prefetch"]
