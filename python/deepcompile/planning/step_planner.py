"""Plans the steps of one sharded model: from estimates when a graph is first compiled, from measurements later, the same on
all ranks.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from deepcompile import plan as planner
from deepcompile.compiler.segments import BACKWARD, FORWARD, Segments, structure_hash
from deepcompile.compiler.step_outline import Saved, StepOutline
from deepcompile.config.config import LEAST
from deepcompile.planning.available_memory import available_memory, memory_name
from deepcompile.planning.batch_sizes import BatchSizes, over_all
from deepcompile.planning.step_graph import ParamMetadata
from deepcompile.planning.step_plan import StepPlan, graph_schedule, step_plan, without_keeping
from deepcompile.planning.whole_step import Inputs, plan_whole_step
from deepcompile.runtime.agreement import Agreement
from deepcompile.runtime.load import _C
from deepcompile.sharding.sharding import CompiledCall, ShardedParam, Sharding
from deepcompile.sharding.state_offload import estimated_bytes

#: Estimated cost of collectives between ranks of one host: latency in nanoseconds, and bytes a second.
_SOCKETS, _SHARED_MEMORY = (100_000, 1_000_000_000), (10_000, 5_000_000_000)
#: By how much a running collective slows compute down, in thousandths. On the caller's thread compute stops completely.
_BESIDE_COMPUTE, _INSTEAD_OF_COMPUTE = 200, 100_000


def _unmeasured_machine(sharding: Sharding) -> planner.Machine:
    machine = planner.preset("8xh200")
    if sharding.runtime.device.type == "cpu":
        machine = planner.preset("2xcpu").replace(
            inside=_SHARED_MEMORY if sharding.runtime.stats()["shared_memory"] else _SOCKETS,
            slowdown=_INSTEAD_OF_COMPUTE if sharding.collectives_stop_compute else _BESIDE_COMPUTE,
        )
    moves_states = sharding.offload is not None and sharding.offload.planned
    # Of all that a plan could offload, the runtime moves only optimizer states, and only if the engine asks for it.
    return machine.replace(name="this", devices=max(1, sharding.world), offload="states" if moves_states else "no")


def _bytes_on_device(pieces: list[list[ShardedParam]]) -> Iterator[int]:
    """Bytes of states on the device while each piece is updated: its own, the piece before (leaving) and the next one."""
    sizes = [0, *(sum(map(estimated_bytes, piece)) for piece in pieces), 0]
    return (sum(sizes[index : index + 3]) for index in range(len(pieces)))


#: Begins the message of a rank that has no plan; the reason follows.
_NO_PLAN = "no plan: "

#: Idle memory for gathered parameters that a device may keep: too little to matter to activations.
_IDLE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class RecordedOptions:
    """How a recorded iteration is planned."""

    machine: planner.Machine  # measured
    budget: int
    prefetch_ahead: int | None  # layers that a gather may be started ahead; None: no limit


@dataclasses.dataclass
class Step:
    """One traced step (or a forward alone) and its plan."""

    name: str
    graphs: dict[str, Segments]
    saved: list[Saved]
    plan: StepPlan | None = None
    why_not: str = ""  # why there is no plan
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    update_seconds: float = 1e-6  # of the optimizer
    measured: bool = False
    ran_in: int = 0  # number of the engine's step in which its forward ran last
    #: Of a recorded iteration; None for compiled graphs.
    recorded: RecordedOptions | None = None
    #: The largest sizes over all batches for which this rank has compiled the graphs.
    own_sizes: BatchSizes | None = None

    @property
    def trains(self) -> bool:
        return BACKWARD in self.graphs


class StepPlanner:
    """Plans the steps of one sharded model. Its construction is a collective."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._config = sharding.config
        self.steps: dict[str, Step] = {}
        self._agreement = Agreement(sharding.group, f"plan/{sharding.serial}", sharding.runtime.timeout)
        self.machine = _unmeasured_machine(sharding)
        self.budget = self._agree_on_budget()
        self._leaves = {sharded.name for sharded in sharding.params if sharded.leaf}
        # Idle memory of released parameters is freed for activations: always under a budget, else on a device only, whose
        # allocator returns it at once. (On a host new pages would cost page faults.)
        if self._config.memory_budget is not None:
            sharding.runtime.limit_idle_memory(0)
        elif sharding.runtime.device.type == "cuda":
            sharding.runtime.limit_idle_memory(_IDLE_BYTES)
        self.use_budget(self.budget)
        self._metadata: dict[str, ParamMetadata] = {}
        self.refresh_metadata()

    def use_budget(self, budget: int) -> None:
        """Later steps run within ``budget``. Small parameters are gathered together and stay for a whole step only when no
        budget is set.
        """
        unbounded = self._config.memory_budget is None and budget >= self.budget
        self._sharding.runtime.gather_small_together(unbounded and self._config.compile.strategy == "auto")

    def refresh_metadata(self) -> None:
        """Collects the parameters' metadata; called again when other parameters are trained or states were made."""
        self._metadata = {sharded.name: self._metadata_of(sharded) for sharded in self._sharding.params}

    def _metadata_of(self, sharded: ShardedParam) -> ParamMetadata:
        param, stays = sharded.param, sharded.persistent or sharded.leaf
        if not param.requires_grad:
            return ParamMetadata(param.nbytes, 0, 0, stays, id=sharded.id)
        offload = self._sharding.offload
        sums_in = self._sharding.sum_dtype(param)
        travels_in = self._config.reduce_dtype or sums_in
        return ParamMetadata(
            shard_bytes=param.nbytes,
            grad_bytes=sharded.numel * travels_in.itemsize,
            state_bytes=estimated_bytes(sharded) if offload is None else offload.bytes_planned(sharded),
            stays=stays,
            sum_bytes=param.numel() * sums_in.itemsize,
            cast_bytes=0 if travels_in == sharded.read_dtype else sharded.numel * sharded.read_dtype.itemsize,
            id=sharded.id,
        )

    def _metadata_between_updates(self) -> dict[str, ParamMetadata]:
        """The metadata for graphs without a backward: states that are on the host between updates take no device memory."""
        offload = self._sharding.offload
        if offload is None or not offload.planned or not any(step.trains for step in self.steps.values()):
            return self._metadata
        away = set(offload.schedule().on_host)
        return {
            name: dataclasses.replace(one, state_bytes=0) if one.id in away else one
            for name, one in self._metadata.items()
        }

    def _agree_on_budget(self) -> int:
        """The bytes that each rank may use: ``memory_budget``, or its part of the free memory. 0: the least that holds a
        step. A collective.
        """
        device = self._sharding.runtime.device
        free = available_memory(device)
        texts = [text.split() for text in self._agreement.exchange(f"{free} {memory_name(device)}", "is about to plan")]
        sharing = Counter(name for _, name in texts)
        if self._config.memory_budget is not None:
            return 0 if self._config.memory_budget == LEAST else self._config.memory_budget
        return min(int(bytes_) // sharing[name] for bytes_, name in texts)

    def plan_step(self, outline: StepOutline) -> Step:
        """The step of these graphs, planned. A structure that was planned before needs no agreement: a rank may compile it
        again alone.
        """
        graphs, saved = dict(outline.graphs), list(outline.saved)
        if all(name in self._leaves for cut_ in graphs.values() for name in cut_.params):
            # Ranks may compile different parts of a leaf module, so such graphs are not planned; see the reason.
            return Step("leaf", graphs, saved, why_not="the parameters of leaf modules are gathered at their entry")
        key = structure_hash(graphs.values())
        own = BatchSizes.of(graphs, saved)
        step = self.steps.get(key)
        if step is not None:
            step.own_sizes = over_all([step.own_sizes, own]) if step.own_sizes is not None else own
            return step
        step = Step(f"step-{len(self.steps)}", graphs, saved, own_sizes=own)
        sizes = self._agree_on_sizes(step, f"graph {key}", "compiled a new graph")
        step.seconds = {phase: list(seconds) for phase, seconds in sizes.seconds.items()}
        self._plan(step)
        self._agree(step, f"graph {key}", "compiled a new graph")
        self.steps[key] = step
        self.place_reductions()
        return step

    def _agree_on_sizes(self, step: Step, what: str, action: str) -> BatchSizes:
        """Combines what the step's graphs need over all ranks: batches may differ, plans may not. A collective."""
        assert step.own_sizes is not None
        by_rank: list[BatchSizes] = []
        for rank, line in enumerate(self._agreement.exchange(f"{what}\n{step.own_sizes.text}", action)):
            other, _, text = line.partition("\n")
            if other != what:
                self._agreement.refuse(what, other, rank, action)
            by_rank.append(BatchSizes.parse(text))
        sizes = over_all(by_rank)
        sizes.put_into(step.graphs)
        step.saved = sizes.saved_buffers()
        return sizes

    def _plan(self, step: Step) -> None:
        """Gives the step a plan, or the reason why there is none."""
        step.plan = None
        if self._sharding.reads_in_place and step.trains:
            step.why_not = "one rank reads its parameters where they lie"
            return
        unknown = [p for segments in step.graphs.values() for p in segments.params if p not in self._metadata]
        if unknown:
            step.why_not = f"the graph gathers {unknown[0]}, which is no parameter of this model"
            return
        recorded = step.recorded
        keeps = not step.trains or recorded is not None or self._may_keep(step)
        # In a plan of one micro-batch out of several, gradient buffers may exist from its start.
        of_all = (self._config.gradient_accumulation_steps or 1) == 1 or (keeps and recorded is None)
        offload = self._sharding.offload
        pieces = offload.pieces if offload is not None and step.trains and recorded is None else []
        # A graph of a part of the model does not know where the states of the other parts are.
        moves_states = offload is not None and offload.planned and bool(pieces) and self.holds_model(step)
        machine = recorded.machine if recorded else self.machine
        inputs = Inputs(
            step.name,
            step.graphs,
            self._metadata if step.trains else self._metadata_between_updates(),
            self._sharding.world,
            step.seconds,
            step.saved,
            step.update_seconds,
            machine if moves_states else machine.replace(offload="no"),
            recorded.budget if recorded else self.budget,
            self._config.compile.strategy,
            self._sharding.frees_gradients and of_all,
            tuple(tuple(sharded.name for sharded in piece) for piece in pieces),
            tuple(_bytes_on_device(pieces)) if offload is not None and not offload.planned else (),
            moves_states,
        )
        try:
            if recorded:
                step.plan = _plan_recorded(inputs, recorded)
            else:
                step.plan = plan_whole_step(inputs, (self._config.gradient_accumulation_steps or 1) if keeps else 1)
        except planner.BudgetError as error:
            step.why_not = str(error)
            return
        except MemoryError:
            step.why_not = f"rank {self._sharding.rank} ran out of memory while planning"
            return
        step.why_not = ""
        if not keeps:
            step.plan = without_keeping(step.plan, self._metadata)
        if recorded is None:
            step.plan.schedules = {
                phase: _C.StepSchedule(graph_schedule(step.plan.graphs[phase], segments, phase))
                for phase, segments in step.graphs.items()
            }

    def plan_recorded(self, step: Step) -> None:
        """Plans a recorded iteration. The caller ensures that all ranks plan the same one."""
        self._plan(step)

    def load_recorded(self, step: Step, graph_text: str, plan_text: str) -> None:
        """Loads a plan that was saved, and verifies it again."""
        assert step.recorded is not None
        graph = planner.StepGraph(graph_text, step.name)
        loaded = planner.load_plan(graph, step.recorded.machine, plan_text)
        step.plan = _with_larger_reductions(step_plan(loaded, step.graphs, self._metadata), self._metadata)

    def _agree(self, step: Step, what: str, action: str) -> None:
        """Checks that all ranks made the same plan. If one rank has none, all run without."""
        own = f"plan {step.plan.hash}" if step.plan else f"{_NO_PLAN}{step.why_not}"
        outcomes = []
        for rank, line in enumerate(self._agreement.exchange(f"{what}\n{own}", action)):
            other, _, outcome = line.partition("\n")
            if other != what:
                self._agreement.refuse(what, other, rank, action)
            outcomes.append(outcome)
        without = next((outcome for outcome in outcomes if outcome.startswith(_NO_PLAN)), None)
        if without is not None:
            step.plan, step.why_not = None, without.removeprefix(_NO_PLAN)
            return
        for rank, outcome in enumerate(outcomes):
            if outcome != own:
                self._agreement.refuse(f"{what}, {own}", f"{what}, {outcome}", rank, action)

    @property
    def plans_reductions(self) -> bool:
        """Whether the plan decides which gradients are reduced together. False if the configuration sets the bucket size;
        and, unless there is a memory budget, if collectives run on the caller's thread, where nothing overlaps them.
        """
        if self._config.zero_optimization.reduce_bucket_size is not None or self._sharding.world == 1:
            return False
        return not self._sharding.collectives_stop_compute or self._config.memory_budget is not None

    def place_reductions(self, plans: Sequence[StepPlan] | None = None) -> None:
        """Tells the runtime which gradients to reduce together from the next backward on: those of ``plans``, by default the
        plans of the compiled graphs.
        """
        if not self.plans_reductions:
            return
        if plans is None:
            plans = [step.plan for step in self.steps.values() if step.trains and step.plan is not None]
        ids = {sharded.name: sharded.id for sharded in self._sharding.params}
        buckets = [[ids[name] for name in bucket] for plan in plans for bucket in plan.reductions]
        in_flight = max((plan.reductions_in_flight for plan in plans), default=2)
        self._sharding.runtime.plan_reductions(self._sharding.graph_id, buckets, in_flight)

    def _may_keep(self, step: Step) -> bool:
        """Whether the step's graphs may keep parameters from forward to backward. A graph of a part of the model does not
        know what other graphs keep, nor how many equal layers it runs for; so it may only if all parameters would fit.
        """
        if self.holds_model(step):
            return True
        everything = sum(s.numel * s.read_dtype.itemsize for s in self._sharding.params)
        held = sum(one.shard_bytes + one.grad_bytes + one.state_bytes for one in self._metadata.values())
        return 2 * (everything + held) <= self.budget

    def holds_model(self, step: Step) -> bool:
        """True if the step's graphs read every trained parameter; else they are only a part of a step."""
        gathered = {param for segments in step.graphs.values() for param in segments.params}
        return gathered >= {name for name, one in self._metadata.items() if one.grad_bytes}

    def in_several_graphs(self, calls: Iterable[CompiledCall], micro_batches: int) -> bool:
        """Whether a step ran in several graphs, according to its ``calls`` on all ranks. A collective."""
        forwards = [call.step for call in calls if call.phase == FORWARD]
        parts = len(forwards) > micro_batches and not any(map(self.holds_model, forwards))
        return all(line == "True" for line in self._agreement.exchange(str(parts), "has run its first step"))

    def replan(
        self, step: Step, seconds: dict[str, list[float]], update_seconds: float, machine: planner.Machine
    ) -> bool:
        """Plans again from measurements, which must be the same on all ranks. True if the plan changed. The new plan is
        active from the next call of a graph on, without compilation.
        """
        before, plan_before = step.plan.graphs if step.plan else None, step.plan
        self.machine = machine
        if self._sharding.offload is not None:
            self.refresh_metadata()  # its states are there now
        self._agree_on_sizes(step, f"{step.name} measured", "planned from measurements")
        step.seconds, step.update_seconds = seconds, update_seconds
        self._plan(step)
        self._agree(step, f"{step.name} measured", "planned from measurements")
        if step.plan is None:
            step.plan = plan_before  # all ranks keep it, so they still agree
            return False
        step.measured = True
        self.place_reductions()
        if step.plan.graphs == before:
            return False
        self._sharding.runtime.reset_gathered_peak()  # the earlier plan may have kept more
        return True

    def training_step(self) -> Step | None:
        """The step that trained most recently; None if there is none, or if several ran in that step."""
        training = [step for step in self.steps.values() if step.trains]
        last = max((step.ran_in for step in training), default=0)
        running = [step for step in training if step.ran_in == last]
        return running[0] if len(running) == 1 else None

    def median_over_ranks(self, value: float, what: str) -> float:
        """A collective, with a deadline."""
        texts = self._agreement.exchange(repr(value), what)
        for rank, text in enumerate(texts):
            try:
                float(text)
            except ValueError:  # the other rank is at another agreement
                self._agreement.refuse(repr(value), text, rank, what)
        return statistics.median(map(float, texts))


def _plan_recorded(inputs: Inputs, options: RecordedOptions) -> StepPlan:
    planned = inputs.plan(micro_batches=1)
    if options.prefetch_ahead is not None:
        planned = planner.limit_prefetch(planned, options.prefetch_ahead)
    return _with_larger_reductions(step_plan(planned, inputs.graphs, inputs.metadata), inputs.metadata)


#: Reductions of recorded steps are merged until each has at least 1/16 of the bytes of all gradients. Curves measured at few
#: sizes underestimate the cost of small reductions.
_SMALLEST_PART = 16


def _with_larger_reductions(plan: StepPlan, metadata: Mapping[str, ParamMetadata]) -> StepPlan:
    every = sum(metadata[name].grad_bytes for bucket in plan.reductions for name in bucket)
    larger: list[tuple[str, ...]] = []
    held: list[str] = []
    for bucket in plan.reductions:
        held += bucket
        if _SMALLEST_PART * sum(metadata[name].grad_bytes for name in held) >= every:
            larger.append(tuple(held))
            held = []
    plan.reductions = (*larger, tuple(held)) if held else tuple(larger)
    return plan


Sharding.planner_type = StepPlanner
