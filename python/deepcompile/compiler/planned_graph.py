"""A compiled graph as a callable: each call follows the schedule that its step has at that time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from deepcompile.compiler.reads import reads_of, slots_of
from deepcompile.compiler.segments import BACKWARD, GATHER, Segments, cut, has_gathers, name_of
from deepcompile.compiler.step_outline import StepOutline
from deepcompile.runtime.load import _C
from deepcompile.sharding.sharding import CompiledCall

_log = logging.getLogger("deepcompile")


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """What the planner needs of a compiled graph beside its code. It is stored with the code in AOTAutograd's cache (see
    ``result_cache.py``), so it can be pickled. It contains no parameter names, so that equal layers can share it.
    """

    phase: str
    #: Of the whole step. Parameters are named by the position of their input (:func:`input_name`).
    outline: StepOutline
    #: For each parameter number of the schedule, the position of its shard among the arguments. None if the compiled graph
    #: has other reads than the planned one.
    shards: tuple[int, ...] | None


def input_name(index: int) -> str:
    """The name of a parameter in a :class:`GraphRecord`."""
    return f"input {index}"


class PlannedGraph:
    """The compiled code of one phase, with the attributes of Inductor's graph that AOTAutograd's cache needs."""

    def __init__(self, function: Callable[..., Any], record: GraphRecord, sharding: Any) -> None:
        vars(self).update({name: value for name, value in vars(function).items() if name in _OF_CACHES})
        self.deepcompile_record = record
        self._function = function
        self._sharding = sharding
        self._phase = record.phase
        self._step: Any = None
        self._boxed_call = True  # takes one list, which it may empty

    def follow(self, step: Any, name: str) -> None:
        """From now on calls follow the schedules of ``step``. ``name``: the graph's, for messages."""
        self._step = step
        if self.deepcompile_record.shards is None and step.plan is not None:
            _log.warning(
                "the %s of %s reads parameters that its plan does not know, as in a branch of torch.cond; what it "
                "reads is gathered on demand",
                self._phase,
                name,
            )

    def __call__(self, args: list[Any]) -> Any:
        step, sharding = self._step, self._sharding
        step.ran_in = sharding.steps_begun
        if sharding.calls is not None and step.trains:
            sharding.calls.append(CompiledCall(step, self._phase))
            sharding.runtime.trace.begin_graph(self._phase == BACKWARD)
        schedule = step.plan.schedules.get(self._phase) if step.plan is not None else None
        shards = self.deepcompile_record.shards
        if schedule is not None and shards is not None:
            _C.begin_graph(sharding.graph_id, schedule, [args[place] for place in shards])
        else:
            _C.begin_graph(sharding.graph_id, None, [])
        try:
            return self._function(args)
        except BaseException:
            _C.begin_graph(sharding.graph_id, None, [])  # later reads do not belong to this graph
            raise


#: Attributes of Inductor's compiled graphs that AOTAutograd's cache reads.
_OF_CACHES = ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr", "_time_taken_ns")


def places_of_shards(module: fx.GraphModule, planned: Segments) -> tuple[int, ...] | None:
    """For each parameter number of the schedule, the position of its shard among the graph's inputs. None if the graph has
    reads that the plan does not know: branches (``torch.cond``) and nested regions are separate graphs inside it.
    """
    graph = module.graph
    parts = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule) and part is not module]
    if any(has_gathers(part) for part in parts) or reads_of(cut(graph)) != reads_of(planned):
        return None
    inputs = {node: index for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    places = {name_of(node): inputs.get(node.args[0]) for node in graph.nodes if node.target is GATHER}
    found = [places.get(name) for name in slots_of(planned)]
    return tuple(place for place in found if place is not None) if None not in found else None
