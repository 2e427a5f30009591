"""Plans a step with all its micro-batches, each of which runs the same two graphs.

First the planner plans the whole accumulation and so decides which parameters stay gathered from one micro-batch to the
next; it assumes that reductions overlap the next forward, as in the runtime. Then it plans one micro-batch with these
parameters gathered. The graphs follow that second plan in every micro-batch, within the same budget.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from deepcompile import plan as planner
from deepcompile.compiler.segments import BACKWARD, Segments
from deepcompile.compiler.step_outline import Saved
from deepcompile.planning.step_graph import ParamMetadata, step_graph
from deepcompile.planning.step_plan import StepPlan, step_plan

#: Steps with more micro-batches are planned as if they had so many: micro-batches repeat, and planning time grows with them.
MOST_MICRO_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a step is planned from."""

    name: str
    graphs: Mapping[str, Segments]
    metadata: Mapping[str, ParamMetadata]
    world: int
    seconds: Mapping[str, list[float]]  # of each segment, by phase
    saved: list[Saved]
    update_seconds: float  # of the optimizer
    machine: planner.Machine
    budget: int  # bytes; 0: the least that holds the step
    strategy: str
    late_gradients: bool = False  # see step_graph
    #: Parameters that are updated together, where states are offloaded, and bytes of states that each piece needs then,
    #: unless the plan moves them (``moves_states``).
    pieces: tuple[tuple[str, ...], ...] = ()
    piece_workspace: tuple[int, ...] = ()
    moves_states: bool = False

    def plan(self, micro_batches: int, kept: Iterable[str] = (), later: bool = False) -> planner.Plan:
        """``later``: plans a micro-batch after the first, whose gradient buffers exist already."""
        graph = step_graph(
            self.name,
            self.graphs,
            self.metadata,
            self.world,
            self.seconds,
            self.saved,
            self.update_seconds,
            micro_batches=micro_batches,
            kept=kept,
            late_gradients=self.late_gradients and not later,
            pieces=self.pieces,
            piece_workspace=self.piece_workspace,
        )
        budget = self.budget or planner.least_budget(graph, self.machine)
        # Strategies other than "planned" may keep a parameter for some micro-batches only, which the graphs, all following
        # one schedule, could not do.
        strategy = "planned" if self.strategy == "auto" and micro_batches > 1 else self.strategy
        return planner.plan(graph, self.machine, budget=budget, strategy=strategy)

    def step_plan(self, planned: planner.Plan, kept: frozenset[str] = frozenset()) -> StepPlan:
        """Splits the plan of one micro-batch by graph."""
        pieces = len(self.pieces) if self.moves_states else 0
        return step_plan(planned, self.graphs, self.metadata, kept, pieces)


def plan_whole_step(inputs: Inputs, micro_batches: int) -> StepPlan:
    """Raises planner.BudgetError when nothing fits."""
    if BACKWARD not in inputs.graphs:
        micro_batches = 1
    count = min(micro_batches, MOST_MICRO_BATCHES)
    planned = inputs.plan(count)
    if count == 1:
        return inputs.step_plan(planned)
    # With the least budget (0) nothing stays from one micro-batch to the next.
    kept = kept_over_micro_batches(planned, inputs.graphs) if inputs.budget else set()
    by_size = sorted(kept, key=lambda param: (_bytes(inputs.graphs, param), param))
    while True:
        try:
            micro = inputs.plan(1, by_size, later=True)
            break
        except planner.BudgetError:
            # The plan of the whole step released some of these before the last micro-batch ended. The graphs cannot, since
            # they run the same schedule each time.
            if not by_size:
                raise
            by_size = by_size[: len(by_size) // 2]
    found = inputs.step_plan(micro, frozenset(by_size))
    return dataclasses.replace(found, planned=planned, micro_batches=count)


def _bytes(graphs: Mapping[str, Segments], param: str) -> int:
    return max(segments.params[param].bytes for segments in graphs.values() if param in segments.params)


def kept_over_micro_batches(planned: planner.Plan, graphs: Mapping[str, Segments]) -> set[str]:
    """Parameters that the plan gathers at most once for all micro-batches. (It may not gather a frozen parameter at all. The
    runtime gathers it once a step, since the program may have changed it between steps.)
    """
    names = planned.graph.params
    gathers = Counter(names[i] for kind, _, _, items in planned.instructions if kind == "gather" for _, i in items)
    used = {param for segments in graphs.values() for segment in segments.segments for param in segment.uses}
    return {param for param in used if gathers[param] <= 1}
