"""The torch.compile backend "deepcompile". Only this file, ``operators.py`` and ``result_cache.py`` touch private parts of
PyTorch's compiler.

AOTAutograd's joint graph is partitioned so that gathered parameters, and all values computed only from them, are recomputed
in the backward and never saved. Forward and backward are planned as one step. Inductor (or nothing, for ``aot_eager``)
compiles each graph once, whatever the plan: at each read the runtime follows the plan's schedule.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

from deepcompile.compiler.compile_log import compiling, graph_name
from deepcompile.compiler.grouped_calls import group_calls
from deepcompile.compiler.live_memory import number
from deepcompile.compiler.planned_graph import GraphRecord, PlannedGraph, input_name, places_of_shards
from deepcompile.compiler.reads import with_reads
from deepcompile.compiler.result_cache import caching
from deepcompile.compiler.segments import (
    BACKWARD,
    FORWARD,
    donate_gradients,
    has_gathers,
    mark_params,
    only_from_gathers,
    reduce_small_later,
    share_gathers,
)
from deepcompile.compiler.step_outline import StepOutline
from deepcompile.runtime.after_import import after_import
from deepcompile.sharding.sharding import open_shardings

Compile = Callable[..., Any]


def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """What ``torch.compile(model, backend="deepcompile")`` calls for each graph."""
    compiler = GraphCompiler(module, example_inputs)
    with compiling(f"the {FORWARD} of {compiler.name}", compiler.sharding):
        return compiler.compile_with_inductor() if compiler.backend == "inductor" else compiler.compile_for_eager()


def load_compiler(kind: str) -> None:
    """Imports the compiler now, which takes seconds, instead of in the first step (as ``torch.compile`` does for its own
    backend).
    """
    if kind == "inductor":
        import torch._inductor.compile_fx  # noqa: F401


def _register(registry: ModuleType) -> None:
    registry.register_backend(compiler_fn=backend, name="deepcompile")


after_import("torch._dynamo.backends.registry", _register)


class GraphCompiler:
    """Compiles one graph that Dynamo traced: its forward and, later, its backward."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._module, self._inputs = module, example_inputs
        self._shardings: list[Any] = []  # more than one if the graph reads parameters of several models
        found: list[tuple[int, Any, str]] = []
        for sharding in open_shardings():
            members = sharding.by_parameter()
            own = [
                (index, sharding, members[value].name)
                for index, value in enumerate(example_inputs)
                if isinstance(value, torch.nn.Parameter) and value in members
            ]
            found += own
            self._shardings += [sharding] if own else []
        #: The sharding whose planner plans the graph.
        self._sharding = self._shardings[-1] if self._shardings else None
        #: Parameter names by the position of their input, made unique: two models may have parameters of the same name.
        self._names = {
            index: name if sharding is self._sharding else f"{name} of graph {sharding.graph_id}"
            for index, sharding, name in found
        }
        #: Fixed here, so that it is the same for the forward and for the backward, which is compiled later.
        self._reads_in_place = all(sharding.reads_in_place for sharding in self._shardings)
        self._step: Any = None
        self._outline: StepOutline | None = None  # of the step, with parameters named by input_name
        self._from_cache: list[PlannedGraph] = []
        #: For messages.
        self.name = graph_name(self._sharding) if self._sharding is not None else ""

    @property
    def sharding(self) -> Any:
        return self._sharding

    @property
    def _runs_alone(self) -> bool:
        """True for steps of an engine on one rank: a gather returns the parameter itself, and no other rank reads it."""
        return self._step is not None and self._reads_in_place

    @property
    def _order(self) -> contextlib.AbstractContextManager[Any]:
        """On one rank, switches off Inductor's reordering for peak memory. It would move the computation of weight gradients
        to the end of the backward, as if that freed them earlier. On one rank gradients live until the update anyway, and
        delaying weight gradients keeps their inputs alive.
        """
        if not self._runs_alone or self.backend != "inductor":
            return contextlib.nullcontext()
        from torch._inductor import config as inductor_config

        patched: contextlib.AbstractContextManager[Any] = inductor_config.patch(reorder_for_peak_memory=False)
        return patched

    @property
    def backend(self) -> str:
        return "inductor" if self._sharding is None else self._sharding.config.compile.backend

    @property
    def variant(self) -> str:
        """Part of cache keys: what the result depends on besides the graph, the registered shapes and the compiler."""
        worlds = [sharding.world for sharding in self._shardings]
        # The cached outline has the sizes of this batch. Symbolic sizes would not be part of the key otherwise.
        sizes = [number(value) for value in self._inputs if isinstance(value, torch.SymInt)]
        return f"deepcompile {worlds} {self._reads_in_place} {sizes}"

    # -- three ways to compile ---------------------------------------------------------------------------------------

    def compile_with_inductor(self) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        if all(sharding.single_rank for sharding in self._shardings):  # nothing to plan

            def compile_one(*args: Any, **kwargs: Any) -> Any:
                with self._logs_compilation(BACKWARD if kwargs.get("is_backward") else FORWARD):
                    return compile_fx_inner(*args, **kwargs)

            return compile_fx(self._module, list(self._inputs), inner_compile=compile_one)
        with caching(self._adopt):
            function = compile_fx(
                self._module,
                list(self._inputs),
                inner_compile=self._compiles(compile_fx_inner),
                config_patches={"custom_partitioner_fn": _partitioner(self)},
            )
        self._plan_what_was_cached()
        return function

    def _adopt(self, function: Compile, record: GraphRecord) -> PlannedGraph:
        """Wraps code that AOTAutograd found in its cache."""
        assert self._sharding is not None
        self._from_cache.append(PlannedGraph(function, record, self._sharding))
        return self._from_cache[-1]

    def _plan_what_was_cached(self) -> None:
        if not self._from_cache:
            return
        names = {input_name(index): name for index, name in self._names.items()}
        self._step = self._planner.plan_step(self._from_cache[0].deepcompile_record.outline.renamed(names))
        for graph in self._from_cache:
            graph.follow(self._step, self.name)

    def compile_for_eager(self) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def compiler(is_backward: bool, is_inference: bool) -> Compile:
            def compile_one(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
                inner = self._compiles(lambda graph, example, **kwargs: make_boxed_func(graph.forward))
                return inner(module, inputs, is_backward=is_backward, is_inference=is_inference)

            return compile_one

        from torch._functorch import config as functorch_config

        with functorch_config.patch(enable_autograd_cache=False):
            return aot_autograd(
                fw_compiler=compiler(False, False),
                bw_compiler=compiler(True, False),
                inference_compiler=compiler(False, True),
                partition_fn=lambda module, inputs, **kwargs: self.partition(module, inputs, **kwargs),
            )(self._module, self._inputs)

    def _logs_compilation(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Logs the compilation of a backward. (:func:`backend` logs that of a forward, tracing and planning included.)"""
        return compiling(f"the {phase} of {self.name}", self._sharding if phase == BACKWARD else None)

    # -- what they share ---------------------------------------------------------------------------------------------

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch.utils.checkpoint import CheckpointPolicy

        for node in only_from_gathers(joint.graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        kwargs.setdefault("compiler", "inductor")
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        self._step = self._plan(forward, backward)
        return forward, backward

    def _plan(self, forward: fx.GraphModule, backward: fx.GraphModule | None) -> Any:
        self._from_cache.clear()  # AOTAutograd rejected the cached result and traces anew
        self._name_params((forward,) if backward is None else (forward, backward))
        outline = StepOutline.of(forward, backward, fuses=self.backend == "inductor")
        self._outline = outline.renamed({name: input_name(index) for index, name in self._names.items()})
        return self._planner.plan_step(outline)

    @property
    def _planner(self) -> Any:
        assert self._sharding is not None
        return self._sharding.planner

    def _name_params(self, graphs: Sequence[fx.GraphModule]) -> None:
        """AOTAutograd calls the inputs primals_1, primals_2, ... in a training graph and arg0_1, arg1_1, ... otherwise."""
        names = {f"primals_{index + 1}": name for index, name in self._names.items()}
        names |= {f"arg{index}_1": name for index, name in self._names.items()}
        mark_params(graphs, names)

    def _compiles(self, inner: Compile) -> Compile:
        def compile_one(module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            if not has_gathers(module.graph):
                return inner(module, example_inputs, **kwargs)
            phase = BACKWARD if kwargs.get("is_backward") else FORWARD
            alone = self._step is None or kwargs.get("is_inference")
            step = self._plan(module, None) if alone else self._step
            assert self._outline is not None
            record = GraphRecord(phase, self._outline, places_of_shards(module, step.graphs[phase]))
            donate_gradients(module.graph)
            with self._logs_compilation(phase), self._order:
                function = inner(_with_graph(module, self._with_reads(module.graph)), example_inputs, **kwargs)
            compiled = PlannedGraph(function, record, self._sharding)
            compiled.follow(step, self.name)
            return compiled

        return compile_one

    def _with_reads(self, graph: fx.Graph) -> fx.Graph:
        if self._runs_alone:
            alone = copy.deepcopy(graph)
            group_calls(alone)
            return alone
        result = with_reads(graph)
        share_gathers(result)  # the graph serves any schedule, and some keep copies after this graph's read
        reduce_small_later(result)
        return result


def _with_graph(module: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module with ``graph`` and the attributes of ``module``. It generates Python code, which takes long for a large
    graph, so it is called once, when the graph is complete.
    """
    other = fx.GraphModule(module, graph)
    other.meta = dict(module.meta)
    return other


def _partitioner(compiler: GraphCompiler) -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            return compiler.partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return compiler.variant

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)  # for the key of Inductor's cache

    return Partitioner()
