"""A compiled graph as text: its recorded orders, the measured machine, and the plans, which are verified when loaded."""

from __future__ import annotations

import json
import os
import pathlib

from torch import nn

from deepcompile import plan as planner
from deepcompile.planning.step_planner import RecordedOptions, Step
from deepcompile.replay.recorded_ops import RecordedOps
from deepcompile.replay.recorded_step import cycles_of
from deepcompile.replay.replay_planning import Variant, sharding_for
from deepcompile.sharding.sharding import Sharding

_FORMAT = "deepcompile compiled graph 1"
_BETWEEN = "\n====\n"


def variants_text(variants: list[Variant], options: RecordedOptions) -> str:
    head = {
        "prefetch_ahead": options.prefetch_ahead,
        "memory_budget": options.budget,
        "update_seconds": variants[0].step.update_seconds,
    }
    parts = [_FORMAT, json.dumps(head), options.machine.text]
    for variant in variants:
        plan = variant.step.plan
        assert plan is not None
        parts += [variant.own_ops().text, plan.planned.graph.text, plan.planned.text]
    return _BETWEEN.join(parts)


def load_variants(
    path: str | os.PathLike[str], model: nn.Module | None
) -> tuple[Sharding, list[Variant], RecordedOptions]:
    """Reads a file of :func:`variants_text`. ``model``: the sharded model; None: the one in this process that fits."""
    file = os.fspath(path)
    parts = pathlib.Path(path).read_text().split(_BETWEEN)
    if parts[0] != _FORMAT or len(parts) < 6 or len(parts) % 3 != 0:
        raise ValueError(f"{file}: not a file that CompiledGraph.save wrote (it should begin with {_FORMAT!r})")
    head = json.loads(parts[1])
    all_ops = [RecordedOps.parse(text, file) for text in parts[3::3]]
    sharding = sharding_for(all_ops[0], model, file)
    options = RecordedOptions(planner.Machine(parts[2]), head["memory_budget"], head["prefetch_ahead"])
    variants: list[Variant] = []
    for ops, graph_text, plan_text in zip(all_ops, parts[4::3], parts[5::3], strict=True):
        cycle = cycles_of(ops)[0]
        step = Step(f"order-{len(variants)}", cycle.graphs, [], seconds=cycle.seconds, measured=True, recorded=options)
        step.update_seconds = head["update_seconds"]
        sharding.planner.load_recorded(step, graph_text, plan_text)
        variants.append(Variant(cycle, step, ops))
    return sharding, variants, options
