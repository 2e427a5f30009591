"""Plans the steps of one sharded model: from estimates when a graph is first compiled, from measurements later, the same on
all ranks.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import fx

from deepcompile import plan as planner
from deepcompile.agreement import Agreement
from deepcompile.prefetch_limit import limit_prefetch
from deepcompile.segments import Segments, cut, structure_hash
from deepcompile.step_plan import (
    BACKWARD,
    FORWARD,
    GraphPlan,
    ParamFacts,
    StepPlan,
    saved_buffers,
    step_graph_text,
    step_plan,
    without_keeping,
)

if TYPE_CHECKING:
    from deepcompile.sharding import Sharding

#: What collectives cost between the ranks of one host before anything is measured.
_SOCKETS = "inside latency=100us bandwidth=1GB"
_SHARED_MEMORY = "inside latency=10us bandwidth=5GB"
#: How much longer compute takes while a collective runs, in thousandths. On the caller's thread it does not go on at all.
_BESIDE_COMPUTE, _INSTEAD_OF_COMPUTE = 200, 100_000
#: The runtime does not offload yet, so that is made too slow to pay.
_NO_OFFLOAD = "to_device latency=1s bandwidth=1MB\nto_host latency=1s bandwidth=1MB\n"


def _unmeasured_machine(sharding: Sharding) -> planner.Machine:
    text = "machine this like 8xh200\n"
    if sharding.runtime.device.type == "cpu":
        slowdown = _INSTEAD_OF_COMPUTE if sharding.collectives_stop_compute else _BESIDE_COMPUTE
        link = _SHARED_MEMORY if sharding.runtime.stats()["shared_memory"] else _SOCKETS
        text = f"machine this like 2xcpu\n{link}\nslowdown {slowdown}\n"
    return planner.Machine(f"{text}{_NO_OFFLOAD}devices {max(1, sharding.world)}\n")


@dataclasses.dataclass(frozen=True)
class RecordedOptions:
    """How an iteration that was recorded as a whole is planned."""

    machine: planner.Machine  # measured
    budget: int
    prefetch_ahead: int | None  # layers that a gather may be started ahead; None: as the planner likes


@dataclasses.dataclass
class Step:
    """One traced step (or a forward alone) and its plan."""

    name: str
    graphs: dict[str, Segments]
    saved: list[tuple[str, int, int, int]]
    plan: StepPlan | None = None
    why_not: str = ""  # why there is no plan
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    update_seconds: float = 1e-6  # of the optimizer
    measured: bool = False
    #: Of a recorded iteration; where not given, the planner's own.
    recorded: RecordedOptions | None = None
    #: Compiles one phase anew with another plan.
    recompile: dict[str, Callable[[GraphPlan], None]] = dataclasses.field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return BACKWARD in self.graphs


class StepPlanner:
    """Making one is a collective."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._config = sharding.config
        self.steps: dict[str, Step] = {}
        self._agreement = Agreement(sharding.group, f"plan/{sharding.graph_id}", self._config.timeout)
        self.machine = _unmeasured_machine(sharding)
        self.budget = self._agree_on_budget()
        self._facts = {
            sharded.name: ParamFacts(
                shard_bytes=sharded.param.nbytes,
                grad_bytes=sharded.numel * max(4, sharded.param.element_size()) if sharded.param.requires_grad else 0,
                state_bytes=2 * sharded.param.nbytes if sharded.param.requires_grad else 0,
                stays=sharded.persistent or sharded.leaf,
            )
            for sharded in sharding.params
        }

    def _agree_on_budget(self) -> int:
        """What each rank may use: of the memory that it shares with others, its part."""
        device = self._sharding.runtime.device
        free = available_memory(device)
        said = [text.split() for text in self._agreement.exchange(f"{free} {memory_name(device)}", "is about to plan")]
        sharing = Counter(name for _, name in said)
        return self._config.memory_budget or min(int(bytes_) // sharing[name] for bytes_, name in said)

    def plan_step(self, forward: fx.GraphModule, backward: fx.GraphModule | None) -> Step:
        """The step of these graphs, planned. A structure that was planned before needs no agreement: a rank may compile it
        again alone.
        """
        graphs = {FORWARD: cut(forward)}
        saved: list[tuple[str, int, int, int]] = []
        if backward is not None:
            graphs[BACKWARD] = cut(backward)
            saved = saved_buffers(graphs[FORWARD], graphs[BACKWARD], backward)
        key = structure_hash(graphs.values())
        known = self.steps.get(key)
        if known is not None:
            return known
        step = Step(f"step-{len(self.steps)}", graphs, saved)
        step.seconds = {phase: [segment.seconds for segment in cut_.segments] for phase, cut_ in graphs.items()}
        self._plan(step)
        outcome = step.plan.hash if step.plan else f"no plan ({step.why_not})"
        self._agreement.require_same(f"graph {key}, plan {outcome}", "compiled a new graph")
        self.steps[key] = step
        return step

    def _plan(self, step: Step) -> None:
        unknown = [p for segments in step.graphs.values() for p in segments.params if p not in self._facts]
        if unknown:
            step.why_not = f"the graph gathers {unknown[0]}, which is no parameter of this model"
            return
        recorded = step.recorded
        machine, budget = (recorded.machine, recorded.budget) if recorded else (self.machine, self.budget)
        text = step_graph_text(
            step.name, step.graphs, self._facts, self._sharding.world, step.seconds, step.saved, step.update_seconds
        )
        graph = planner.StepGraph(text, step.name)
        try:
            planned = planner.plan(graph, machine, budget=budget, strategy=self._config.compile.strategy)
        except planner.BudgetError as error:
            step.plan, step.why_not = None, str(error)
            return
        if any(kind in ("offload", "reload") for kind, _, _, _ in planned.instructions):
            step.plan, step.why_not = None, f"{budget} bytes do not hold the step without offloading"
            return
        if recorded and recorded.prefetch_ahead is not None:
            planned = limit_prefetch(graph, machine, planned, step.graphs, recorded.prefetch_ahead)
        step.plan = step_plan(text, planned, step.graphs, self._facts)
        step.why_not = ""
        if step.trains and not recorded and not self._may_keep(step):
            step.plan = without_keeping(step.plan, self._facts)

    def plan_recorded(self, step: Step) -> None:
        """Plans an iteration that was recorded. The caller sees to it that all ranks do and mean the same."""
        self._plan(step)

    def load_recorded(self, step: Step, graph_text: str, plan_text: str) -> None:
        """Takes a plan that was made before, proved again."""
        assert step.recorded is not None
        graph = planner.StepGraph(graph_text, step.name)
        step.plan = step_plan(
            graph_text, planner.load_plan(graph, step.recorded.machine, plan_text), step.graphs, self._facts
        )

    def _may_keep(self, step: Step) -> bool:
        """A graph that holds only a part of the model does not know what others keep, nor for how many equal layers it runs:
        it keeps parameters to the backward only where all of them could stay.
        """
        gathered = {param for segments in step.graphs.values() for param in segments.params}
        if gathered >= {name for name, fact in self._facts.items() if fact.grad_bytes}:
            return True
        everything = sum(s.numel * s.read_dtype.itemsize for s in self._sharding.params)
        held = sum(fact.shard_bytes + fact.grad_bytes + fact.state_bytes for fact in self._facts.values())
        return 2 * (everything + held) <= self.budget

    def replan(
        self, step: Step, seconds: dict[str, list[float]], update_seconds: float, machine: planner.Machine
    ) -> bool:
        """Plans again from measurements, which are the same on all ranks. True when the graphs do something else now."""
        before = step.plan.graphs if step.plan else None
        self.machine = machine
        step.seconds, step.update_seconds, step.measured = seconds, update_seconds, True
        self._plan(step)
        outcome = step.plan.hash if step.plan else "none"
        self._agreement.require_same(f"{step.name} measured, plan {outcome}", "planned from measurements")
        if step.plan is None or step.plan.graphs == before:
            return False
        for phase, recompile in step.recompile.items():
            if before is None or step.plan.graphs[phase] != before[phase]:
                recompile(step.plan.graphs[phase])
        return True

    def training_step(self) -> Step | None:
        """The one step that trains; None where there is none or more than one."""
        training = [step for step in self.steps.values() if step.trains]
        return training[0] if len(training) == 1 else None


def memory_name(device: torch.device) -> str:
    """The same for ranks that share one memory."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return platform.node() or "host"


def available_memory(device: torch.device) -> int:
    """Bytes that could be used on the device (the host for CPU), now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


__all__ = ["RecordedOptions", "Step", "StepPlanner", "available_memory"]
