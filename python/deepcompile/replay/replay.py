"""``deepcompile.compile``: from recorded operations to a compiled graph."""

from __future__ import annotations

from typing import Literal

from torch import nn

from deepcompile.config.config import LEAST
from deepcompile.planning.step_planner import RecordedOptions
from deepcompile.replay import recording
from deepcompile.replay.compiled_graph import CompiledGraph
from deepcompile.replay.noop_replay import NoopReplay
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.replay.recorded_step import cycles_of
from deepcompile.replay.replay_planning import new_agreement, plan_cycles, require_same_reads, sharding_for
from deepcompile.sharding.sharding import Sharding


def compile(
    recorded_ops: RecordedOps | None = None,
    zero_stage: int | None = None,
    prefetch_ahead: int | Literal["auto"] = "auto",
    *,
    memory_budget: int | Literal["least"] | None = None,
    model: nn.Module | None = None,
) -> CompiledGraph:
    """Plans the recorded iteration, verifies the plan, and agrees on it with all ranks. Every rank calls it, with its own
    ``recorded_ops`` (default: :func:`deepcompile.get_recorded_ops`).

    ``zero_stage``: if set, must be the recorded one. ``prefetch_ahead``: at most how many layers (modules with parameters of
    their own) ahead of its use a gather may start; ``"auto"``: the planner decides. ``memory_budget``: bytes of a rank for
    parameters, gradients and optimizer states; ``"least"``: the least that they need; None: as configured, by default the
    free memory.
    """
    ops = recording.get_recorded_ops() if recorded_ops is None else recorded_ops
    if not isinstance(ops, RecordedOps):
        raise TypeError(
            f"compile: recorded_ops must come from deepcompile.get_recorded_ops(), not a {type(ops).__name__}"
        )
    ahead = _checked_ahead(prefetch_ahead)
    if memory_budget not in (None, LEAST) and (not isinstance(memory_budget, int) or memory_budget <= 0):
        raise ValueError(f"compile: memory_budget is {memory_budget!r}; it is a number of bytes above 0, or {LEAST!r}")
    if zero_stage is not None and zero_stage != ops.model.stage:
        raise ValueError(
            f"compile: zero_stage is {zero_stage!r}, and the ops were recorded under stage {ops.model.stage}; pass that, or "
            "shard the model for the other stage and record again"
        )
    recording.require_whole_iterations(ops)
    sharding = sharding_for(ops, model, "recorded_ops")
    if sharding.single_rank:
        return NoopReplay(sharding, ops)
    budget = sharding.planner.budget if memory_budget is None else 0 if memory_budget == LEAST else memory_budget
    return plan_recorded(sharding, ops, budget, ahead)


def plan_recorded(
    sharding: Sharding, ops: RecordedOps, budget: int, ahead: int | None = None, *, compiled: bool = False
) -> CompiledGraph:
    """Plans a recorded iteration and agrees on the plan. ``compiled``: it ran in compiled graphs. Every rank calls it."""
    agreement = new_agreement(sharding)
    cycles = cycles_of(ops)
    require_same_reads(sharding, cycles)
    first = [cycle for cycle in cycles if cycle.key == cycles[0].key]
    options = RecordedOptions(sharding.planner.machine, budget, ahead)
    variant = plan_cycles(sharding, first, ops, options, "order-0")
    agreement.require_same(f"{variant.outcome}, reads {cycles[0].key}", "planned a recorded iteration")
    if variant.step.plan is None:
        raise RuntimeError(f"compile: there is no plan for what was recorded: {variant.step.why_not}")
    assert variant.step.recorded is not None
    graph = CompiledGraph(sharding, [variant], variant.step.recorded, agreement, compiled=compiled)
    for cycle in cycles:
        graph.add_variant(cycle.key, ops)  # other orders that were recorded
    return graph


def _checked_ahead(value: int | str) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f'compile: prefetch_ahead is {value!r}; it is a number of layers, or "auto"')
    if value < 0:
        raise ValueError(
            f'compile: prefetch_ahead is {value}; it counts layers: 0 gathers on demand, "auto" lets the planner choose'
        )
    return value
