"""The planned schedule of a recorded model: ``with compiled_graph.execute():`` runs iterations by it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections import Counter
from collections.abc import Iterator

from torch import nn

from deepcompile import plan as planner
from deepcompile.compiler.segments import FORWARD
from deepcompile.planning.report import Explanation, predicted_exposed, step_rows
from deepcompile.planning.step_planner import RecordedOptions
from deepcompile.replay import recording
from deepcompile.replay.compiled_graph_file import load_variants, variants_text
from deepcompile.replay.recorded_ops import ModelRecord, RecordedOps, dtype_name
from deepcompile.replay.recorded_step import Read, across_graphs, cycles_of, reads_key, schedule
from deepcompile.replay.replay_planning import Variant, new_agreement, plan_cycles
from deepcompile.runtime.agreement import Agreement
from deepcompile.runtime.load import _C
from deepcompile.runtime.step_trace import TraceFile
from deepcompile.sharding.sharding import Sharding

_log = logging.getLogger("deepcompile")

#: When the same order of reads has diverged from the plans this often, it is planned as well. ("Kind": one such order.)
SAME_KIND = 3
#: Iterations recorded, at most, while waiting for a kind to come once more. (On a device recording blocks the host.)
MOST_AWAITED = 64
#: Orders that have a plan, at most. Each costs memory for its plan, not for parameters.
MOST_VARIANTS = 16
#: Kinds of divergences that are logged; later ones are only counted.
MOST_LOGGED = 8

#: Graph ids of models that are inside ``execute`` now.
_executing: set[int] = set()


class CompiledGraph:
    """The planned schedule of one sharded model. Made by :func:`compile` or :meth:`load`, by every rank."""

    def __init__(
        self,
        sharding: Sharding,
        variants: list[Variant],
        options: RecordedOptions,
        agreement: Agreement,
        *,
        compiled: bool = False,
    ) -> None:
        self._compiled = compiled  # the recorded step ran in compiled graphs
        self._sharding = sharding
        self._variants = variants
        self._options = options
        self._agreement = agreement
        self._model = ModelRecord.of(sharding)
        self._keys = {s.name: (s.id, s.read_dtype) for s in sharding.params}
        self._follower = _C.ScheduleFollower(
            [schedule(variant.cycle, variant.step, self._keys) for variant in variants],
            {s.id for s in sharding.params if s.leaf},
            {s.id for s in sharding.params if s.persistent},
            self._agree_on_difference,
            sharding.names,
        )
        self._kinds: Counter[str] = Counter()  # divergences by what was read
        self._awaited: Counter[str] = Counter()  # for each kind, iterations recorded since it last came
        self._refused: set[str] = set()  # kinds that could not be planned
        self._logged: set[str] = set()
        self._trace_file: TraceFile | None = None
        self._recording: recording.Recording | None = None
        self._activations = 0  # so far; every rank counts the same

    # -- running -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def execute(self) -> Iterator[None]:
        """Iterations inside follow the plan: it decides which gathers start early and are fused, which parameters stay
        gathered to the backward, and which gradients are reduced together. The model's code does not change.
        """
        graph_id = self._sharding.graph_id
        self.activate()
        try:
            yield
            _C.end_cycle(graph_id)
        except Exception as error:
            self.abandon()
            self.explain_failure(error)
            raise
        finally:
            self.deactivate()
        self.after_iteration()

    def _require_ready(self) -> None:
        if not self._sharding.is_open:
            raise RuntimeError("execute: the model's runtime was closed; shard the model and record it again")
        if self._sharding.graph_id in _executing:
            raise RuntimeError(
                "execute: this model is executing already; execute() cannot be nested or entered twice. "
                "Leave the first block before the next iteration"
            )
        now = ModelRecord.of(self._sharding)
        difference = self._model.difference(now) if now != self._model else self._replaced()
        if difference:
            raise RuntimeError(
                f"execute: the model has changed since it was recorded: {difference}. Record an iteration and compile again"
            )

    def _replaced(self) -> str:
        for sharded in self._sharding.params:
            for module, attribute in sharded.places:
                if module._parameters.get(attribute) is not sharded.param:
                    return f"parameter '{sharded.name}' was replaced"
        return ""

    def activate(self) -> None:
        """From here on the model's reads follow the plan. Called by the engine; other programs use :meth:`execute`."""
        self._require_ready()
        graph_id = self._sharding.graph_id
        _executing.add(graph_id)
        self._drop_readers()  # of an iteration that was interrupted
        self._activations += 1
        if self._wants_variant():
            self._recording = recording.Recording(self._sharding, compiled=self._compiled)
        if self._trace_file is not None:
            self._trace_file.begin(self._sharding.runtime)
        step = self._variants[0].step
        if step.plan is not None:
            self._sharding.planner.place_reductions([step.plan])
        _C.follow(graph_id, self._follower)
        self._sharding.planner.use_budget(self._options.budget)
        self._sharding.runtime.hold_shards(True)

    def deactivate(self) -> None:
        graph_id = self._sharding.graph_id
        self._sharding.runtime.hold_shards(False)
        _executing.discard(graph_id)
        if self._sharding.is_open:
            _C.follow(graph_id, None)
            self._sharding.planner.place_reductions()

    def abandon(self) -> None:
        """The iteration is given up: what was read of it is worth nothing."""
        self.deactivate()
        self._drop_readers()

    def _drop_readers(self) -> None:
        if self._recording is not None:
            self._recording.drop()
            self._recording = None
        if self._trace_file is not None:
            self._trace_file.drop()

    def after_iteration(self) -> None:
        """Handles the divergences of the iteration: logs them, and plans kinds that have come often. Every rank calls it at
        the same point.
        """
        divergences = [
            (
                difference,
                reads_key(
                    Read(self._sharding.names[id], dtype_name(dtype), kind, back) for id, dtype, kind, back in reads
                ),
            )
            for difference, reads in self._follower.take_divergences()
        ]
        ops = None
        if self._recording is not None:
            self._awaited.update(key for key in self._kinds if self._awaits(key))
            if any(self._kinds[key] + 1 >= SAME_KIND for _, key in divergences):
                ops = self._recording.stop()
            else:
                self._recording.drop()
            self._recording = None
        if self._trace_file is not None and self._trace_file.begun:
            self._trace_file.write(self._sharding.names, self._sharding.rank)
            self._trace_file = None
        for difference, key in divergences:
            self._kinds[key] += 1
            self._awaited.pop(key, None)
            self._log_divergence(key, difference)
            if ops is not None and self._kinds[key] >= SAME_KIND:
                self.add_variant(key, ops)

    def _log_divergence(self, key: str, difference: str) -> None:
        if key in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(key)
        if self._sharding.rank == 0:
            _log.warning(
                "deepcompile: an iteration left the recorded order: %s. It is right, and what was not planned is gathered "
                "on demand. Said once for each kind%s; compiled_graph.divergences counts them",
                difference,
                ", and no more after this one" if len(self._logged) == MOST_LOGGED else "",
            )

    def _wants_variant(self) -> bool:
        return len(self._variants) < MOST_VARIANTS and any(map(self._awaits, self._kinds))

    def _awaits(self, key: str) -> bool:
        """Whether iterations are to be recorded until this kind comes again, so that it can be planned."""
        often = self._kinds[key] >= SAME_KIND - 1 and self._awaited[key] < MOST_AWAITED
        return often and key not in self._refused and not self._has(key)

    def _has(self, key: str) -> bool:
        return any(variant.cycle.key == key for variant in self._variants)

    def add_variant(self, key: str, ops: RecordedOps) -> None:
        if self._has(key) or len(self._variants) >= MOST_VARIANTS:
            return
        cycles = [cycle for cycle in cycles_of(ops, releases=False) if cycle.key == key]
        if not cycles:
            return  # the recording may lack reads of persistent parameters; a later one may have them
        variant = plan_cycles(self._sharding, cycles, ops, self._options, f"order-{len(self._variants)}")
        self._agreement.require_same(variant.outcome, "planned another order of reads")
        if variant.step.plan is None:
            self._refused.add(key)
            return
        self._variants.append(variant)
        self._follower.add_schedule(schedule(variant.cycle, variant.step, self._keys))
        if self._sharding.rank == 0:
            _log.info("deepcompile: an order of reads that came %d times is planned as well", self._kinds[key])

    def _agree_on_difference(self, difference: str) -> None:
        if self._sharding.world == 1:
            return
        what = f"left the recorded order of reads ({difference}; the first one of this iteration or after it)"
        for rank, text in enumerate(self._agreement.exchange(f"{self._activations}\n{difference}", what)):
            _, _, other = text.partition("\n")
            if other != difference:
                self._agreement.refuse(difference, other, rank, what)

    def explain_failure(self, error: Exception) -> None:
        """Raises a clearer error if another rank left the recorded order and this rank did not. A rank that waits in a later
        iteration has passed this one, so it is no reason for ``error``.
        """
        if self._sharding.world == 1:
            return
        for rank, text in self._agreement.waiting_ranks().items():
            activations, _, difference = text.partition("\n")
            if activations == str(self._activations):
                raise RuntimeError(
                    f"rank {rank} left the recorded order of reads alone, and rank {self._sharding.rank} did not: on rank "
                    f"{rank} {difference}. A gather needs every rank: let all ranks take the same branch, or name the "
                    "module whose parameters only some ranks use in config key 'zero_optimization.leaf_modules'"
                ) from error

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def predicted_step_time(self) -> float:
        """Seconds that an iteration of the recorded order is predicted to take, the optimizer's step included."""
        return self._planned.step_ns * 1e-9

    @property
    def _planned(self) -> planner.Plan:
        plan = self._variants[0].step.plan
        assert plan is not None
        return plan.planned

    @property
    def on_demand_step_time(self) -> float:
        """The same for gathering on demand, from the same measurements."""
        plan = self._variants[0].step.plan
        assert plan is not None
        planned = planner.plan(plan.planned.graph, self._options.machine, budget=None, strategy="on_demand")
        return planned.step_ns * 1e-9

    @property
    def divergences(self) -> int:
        """Iterations (micro-batches) that left every recorded order."""
        return self._follower.divergences

    @property
    def variants(self) -> int:
        return len(self._variants)

    def rows(self) -> list[tuple[str, str]]:
        step, follower = self._variants[0].step, self._follower
        rows = [
            *(self._compiled_rows() if self._compiled else [self._replay_row()]),
            *step_rows(step),
            ("predicted on demand", f"{self.on_demand_step_time * 1e3:.2f} ms"),
            (
                "followed",
                f"{follower.cycles} iterations: {follower.divergences} left every order, {follower.switches} times went to "
                f"another, {follower.dropped} copies gathered for nothing",
            ),
        ]
        return rows

    def _replay_row(self) -> tuple[str, str]:
        ahead = self._options.prefetch_ahead
        return (
            "replay",
            f"{len(self._variants)} recorded orders, {len(self._variants[0].cycle.reads)} reads in the first; gathers "
            f"start {'as early as planned' if ahead is None else f'at most {ahead} layers ahead'}",
        )

    def _compiled_rows(self) -> list[tuple[str, str]]:
        variant = self._variants[0]
        calls = variant.cycle.calls
        forward = calls.count(FORWARD)
        started, kept = across_graphs(variant.cycle, schedule(variant.cycle, variant.step, self._keys))
        return [
            (
                "compiled",
                f"the step lies in {len(calls)} graphs, {forward} of the forward and {len(calls) - forward} of the "
                f"backward, planned as one; orders known: {len(self._variants)}",
            ),
            (
                "across graphs",
                f"{started} gathers start before the graph that reads them, {kept} parameters are kept for a later one",
            ),
        ]

    def explain(self) -> Explanation:
        """The plan, what it is predicted to give, what was followed, and the planner's reasons. ``print`` it."""
        return Explanation(self.rows(), self._planned.explain(20))

    def one_line(self) -> str:
        gain = self.on_demand_step_time / self.predicted_step_time
        what = "recorded order replayed"
        if self._compiled:
            what = f"step in {len(self._variants[0].cycle.calls)} graphs planned as one"
        return (
            f"deepcompile: ZeRO-{self._model.stage} on {self._model.world} ranks, {what} by plan "
            f"'{self._planned.strategy}': step predicted {self.predicted_step_time * 1e3:.2f} ms, {gain:.2f}x faster "
            f"than on demand, {predicted_exposed(self._variants[0].step) * 1e3:.2f} ms of communication exposed"
        )

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the next executed iteration to ``path`` for Perfetto or chrome://tracing."""
        self._trace_file = TraceFile(path)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Rank 0 writes the orders and their plans as text. Every rank calls it."""
        if self._sharding.rank == 0:
            temporary = pathlib.Path(f"{os.fspath(path)}.part")
            temporary.write_text(variants_text(self._variants, self._options))
            temporary.replace(path)
        self._agreement.require_same("saved", "saved a compiled graph")

    @staticmethod
    def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> CompiledGraph:
        """Loads a file of :meth:`save`, for the same model sharded in the same way. Every rank calls it."""
        sharding, variants, options = load_variants(path, model)
        agreement = new_agreement(sharding)
        agreement.require_same(" ".join(variant.outcome for variant in variants), "loaded a compiled graph")
        return CompiledGraph(sharding, variants, options, agreement)
