"""Plans recorded cycles from the measurements of all ranks, which must have read the same parameters in the same order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn

from deepcompile.planning.profile import by_size, over_ranks
from deepcompile.planning.step_planner import RecordedOptions, Step
from deepcompile.replay.recorded_ops import ModelRecord, RecordedOps
from deepcompile.replay.recorded_step import Cycle, cycles_of
from deepcompile.runtime.agreement import Agreement
from deepcompile.sharding.sharding import Sharding, open_shardings, sharding_of

#: How many compiled graphs each model has had (the same on all ranks). The number keeps their agreements apart.
_numbers: Counter[int] = Counter()


@dataclasses.dataclass
class Variant:
    """One order in which the program read its parameters, with its plan."""

    cycle: Cycle
    step: Step
    ops: RecordedOps

    @property
    def outcome(self) -> str:
        """The result of planning as text, which must be the same on all ranks."""
        step = self.step
        return f"plan {step.plan.hash}" if step.plan is not None else f"no plan ({step.why_not})"

    def own_ops(self) -> RecordedOps:
        """The operations of one cycle with this order, which is all that a file needs."""
        ends = [index for index, op in enumerate(self.ops) if op.kind == "end"]
        for number, cycle in enumerate(cycles_of(self.ops)):
            if cycle.key == self.cycle.key:
                first = ends[number - 1] + 1 if number else 0
                return RecordedOps(self.ops[first : ends[number] + 1], model=self.ops.model, tail=self.ops.tail)
        raise AssertionError("the order is not in its own recording")


def new_agreement(sharding: Sharding) -> Agreement:
    number = _numbers[sharding.graph_id]
    _numbers[sharding.graph_id] += 1
    return Agreement(sharding.group, f"replay/{sharding.graph_id}/{number}", sharding.config.timeout)


def sharding_for(ops: RecordedOps, model: nn.Module | None, source: str) -> Sharding:
    """The sharded model that the operations were recorded of."""
    candidates = [sharding_of(model)] if model is not None else open_shardings()
    if not candidates:
        raise RuntimeError(f"{source}: no model is sharded in this process; shard the model that was recorded first")
    differences = [(sharding, ops.model.difference(ModelRecord.of(sharding))) for sharding in candidates]
    fitting = [sharding for sharding, difference in differences if not difference]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RuntimeError(f"{source}: {len(fitting)} sharded models fit; name the one that was recorded with model=")
    sharding, difference = differences[-1]
    raise ValueError(
        f"{source}: recorded of another model than {type(sharding.model).__qualname__} as it is sharded now: {difference}. "
        "Record an iteration of this model"
    )


def require_same_reads(sharding: Sharding, cycles: list[Cycle]) -> None:
    """Raises an error unless all ranks recorded the same reads, since their plans must start the same gathers."""
    mine = [[tuple(read) for read in cycle.reads] for cycle in cycles]
    by_rank: list[Any] = [None] * sharding.world
    dist.all_gather_object(by_rank, mine, group=sharding.group)
    for rank, theirs in enumerate(by_rank):
        if theirs == by_rank[0]:
            continue
        for number, (first, other) in enumerate(zip(by_rank[0], theirs, strict=False)):
            for place in range(max(len(first), len(other))):
                pair = [reads[place][0] if place < len(reads) else "nothing more" for reads in (first, other)]
                if first[place : place + 1] != other[place : place + 1]:
                    raise RuntimeError(
                        f"compile: the ranks recorded different reads: read {place} of pass {number} was '{pair[0]}' on "
                        f"rank 0 and '{pair[1]}' on rank {rank} (said by rank {sharding.rank}). Where ranks route "
                        "differently, name the module in config key 'zero_optimization.leaf_modules'"
                    )
        raise RuntimeError(
            f"compile: rank 0 recorded {len(by_rank[0])} passes and rank {rank} {len(theirs)} (said by rank "
            f"{sharding.rank}); record the same iterations on every rank"
        )


def plan_cycles(
    sharding: Sharding, cycles: list[Cycle], ops: RecordedOps, options: RecordedOptions, name: str
) -> Variant:
    """Plans cycles with the same reads, from the measurements of all ranks. Every rank calls it."""
    seconds = {
        phase: [min(column) for column in zip(*(cycle.seconds[phase] for cycle in cycles), strict=True)]
        for phase in cycles[0].seconds
    }
    own = {
        "seconds": seconds,
        "gathers": by_size((op.bytes, op.end - op.start) for op in ops if op.kind == "all_gather"),
        "reductions": by_size((op.bytes, op.end - op.start) for op in ops if op.kind == "reduce_scatter"),
        "uses": {phase: segments.structure for phase, segments in cycles[0].graphs.items()},
        "update": ops.tail,
        "budget": options.budget,
    }
    by_rank: list[Any] = [None] * sharding.world
    dist.all_gather_object(by_rank, own, group=sharding.group)
    cycle = cycles[0]
    _adopt_uses(cycle, by_rank[0]["uses"])
    medians, update_seconds, machine = over_ranks(by_rank, options.machine)
    recorded = RecordedOptions(machine, min(one["budget"] for one in by_rank), options.prefetch_ahead)
    step = Step(
        name,
        cycle.graphs,
        [],
        seconds=medians,
        update_seconds=update_seconds,
        measured=True,
        recorded=recorded,
    )
    sharding.planner.plan_recorded(step)
    return Variant(cycle, step, ops)


def _adopt_uses(cycle: Cycle, uses: dict[str, Any]) -> None:
    """Takes over rank 0's uses. The time of a release, and so the segment in which a use ends, differs between ranks."""
    for phase, structure in uses.items():
        for segment, (used, grads) in zip(cycle.graphs[phase].segments, structure, strict=True):
            segment.uses, segment.grads = list(used), list(grads)
