"""Calls of our operators take a short way from Python to the dispatcher, and nobody can tell but by the time."""

from __future__ import annotations

import copy
import ctypes
import datetime
import inspect
import pathlib
import pickle
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import deepcompile
from deepcompile import _C, dc
from harness import only_on_cpu, run_ranks
from z3_fixture import GRAPH, start, whole_parameter

ops = torch.ops.dc


def operators() -> list[torch._ops.OpOverload]:
    names = (name.split("::") for name in _C.direct_operators())
    return [getattr(getattr(torch.ops, space), name).default for space, name in names]


def test_every_argument_of_a_direct_operator_has_the_default_that_the_short_way_assumes() -> None:
    for operator in operators():
        for argument in operator._schema.arguments:
            if argument.has_default_value():
                assert argument.default_value in (None, False, 0), f"{operator}: {argument.name}"


def test_the_operators_are_called_directly() -> None:
    for operator in operators():
        for called in (operator, operator.overloadpacket):
            assert called._op.__name__ == "direct_call"
            theirs = torch.ops.aten.add if called is operator.overloadpacket else torch.ops.aten.add.Tensor
            assert inspect.signature(called) == inspect.signature(theirs), "tools that ask find what others tell"


def test_a_call_needs_no_frame_of_python_and_the_operator_is_what_it_was() -> None:
    for operator in operators():
        assert isinstance(operator, torch._ops.OpOverload)
        assert isinstance(operator.overloadpacket, torch._ops.OpOverloadPacket)
        assert operator.overloadpacket.default is operator
        for called in (operator, operator.overloadpacket):
            assert type(called).__call__ is called._op
        assert copy.deepcopy(operator) is operator
    graph = torch.fx.Graph()
    graph.output(graph.call_function(ops.wait_allgather.default, (graph.placeholder("a"), 0, 0)))
    restored = pickle.loads(pickle.dumps(torch.fx.GraphModule({}, graph)))
    assert [node.target for node in restored.graph.nodes if node.op == "call_function"] == [ops.wait_allgather.default]


def refuse(*arguments: object, **keywords: object) -> None:
    raise AssertionError("the general way was taken")


def takes_the_short_way(rank: int, world: int) -> None:
    """Under ``set_default_device``, as in all tests."""
    shards, _ = start(rank, world)

    def short(name: str, *arguments: object) -> object:
        return _C.direct_call(f"dc::{name}", refuse)(*arguments)

    empty = torch.empty(0)
    short("prefetch_params_fused", GRAPH, [empty], (0,))
    short("prefetch_params_fused", GRAPH, (empty, empty), [1, 2], [torch.float, torch.half])
    whole = short("allgather_param", torch.nn.Parameter(shards[0]), GRAPH, 0)
    assert torch.equal(short("wait_allgather", whole, GRAPH, 0), whole_parameter(0))
    short("allgather_param", shards[1], GRAPH, 1, None)
    short("allgather_param", shards[2], GRAPH, 2, torch.half)
    for index in range(3):
        short("release_param", empty, GRAPH, index, 1)
    assert torch.equal(short("gather_shard", shards[0], GRAPH, torch.Size((5, 3)), None, False, 0), whole_parameter(0))
    assert len(short("gather_shards", shards, GRAPH, [5, 3] * 3, [2] * 3)) == 3
    short("prefetch_shards", shards, GRAPH, [torch.float] * 3)
    dc.start_backward(True)
    short("reduce_grad", torch.ones(5, 3), GRAPH, 2)
    short("reduce_shard", torch.ones(5, 3), shards[1], GRAPH, True)
    short("reduce_shards", [torch.ones(5, 3)], [shards[0]], GRAPH, [1])
    ops.end_backward(GRAPH)
    # One argument less than there must be, or another kind of argument, is not for the short way.
    for arguments in ((shards[0], GRAPH), (shards[0], GRAPH, 0.0), (shards[0].as_subclass(Subclass), GRAPH, 0)):
        with pytest.raises(AssertionError, match="general way"):
            short("allgather_param", *arguments)
    with SeenFunctions(), pytest.raises(AssertionError, match="general way"):
        short("allgather_param", shards[0], GRAPH, 0)


def test_plain_arguments_take_the_short_way_and_others_do_not() -> None:
    run_ranks(1, takes_the_short_way)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


class Subclass(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if "dc." in str(function):
            cls.calls += 1
        return super().__torch_function__(function, types, arguments, keywords or {})


def both_ways(rank: int, world: int) -> None:
    shards, buffers = start(rank, world)
    empty = torch.empty(0)
    short = ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)
    general = ops.allgather_param(a=shards[0], graph_id=GRAPH, id=0, dtype=None)
    assert torch.equal(short, whole_parameter(0)) and short.data_ptr() == general.data_ptr()
    ops.release_param(short, GRAPH, 0, 1)
    # Every kind of argument: lists and tuples, dtypes given, None and left out.
    half = ops.allgather_param.default(shards[1], GRAPH, 1, torch.half)
    assert ops.wait_allgather(half, GRAPH, 1).dtype == torch.half
    ops.prefetch_params_fused(GRAPH, [empty, empty], (0, 2), [torch.float, torch.half])
    assert ops.allgather_param(shards[2], GRAPH, 2, torch.half).dtype == torch.half
    for index in range(3):
        ops.release_param(empty, GRAPH, index, 1)
    whole = ops.gather_shard(shards[0], GRAPH, torch.Size((5, 3)), None, False, 0)
    assert torch.equal(whole, whole_parameter(0))
    assert all(map(torch.equal, ops.gather_shards(shards, GRAPH, [5, 3] * 3, [2] * 3), map(whole_parameter, range(3))))
    dc.start_backward(True)
    for index in range(3):
        ops.reduce_grad(torch.full((5, 3), float(index)), GRAPH, index)
    ops.end_backward(GRAPH)
    assert all(bool((buffer == index).all()) for index, buffer in enumerate(buffers))


def test_both_ways_give_the_same() -> None:
    run_ranks(1, both_ways)


def observers(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    with Seen() as seen, torch.no_grad():
        ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)
    assert "dc.allgather_param.default" in seen.names and "dc.wait_allgather.default" in seen.names
    with SeenFunctions() as functions:
        ops.release_param(torch.empty(0), GRAPH, 0, 1)
    assert any("release_param" in name for name in functions.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)
    assert {"dc::allgather_param", "dc::wait_allgather"} <= {event.key for event in profile.key_averages()}
    ops.release_param(torch.empty(0).as_subclass(Subclass), GRAPH, 0, 1)
    assert Subclass.calls == 1


def test_modes_profilers_and_subclasses_see_the_calls() -> None:
    run_ranks(1, observers)


def errors(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    texts = []
    for call in (
        lambda: ops.allgather_param(shards[0], 9, 0),
        lambda: ops.allgather_param(shards[0], graph_id=9, id=0),
    ):
        with pytest.raises(RuntimeError, match="no graph with id 9") as raised:
            call()
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    for wrong in ((shards[0],), (shards[0], 0, 0, None, 1), ("text", 0, 0), (shards[0], 0.5, 0), (shards[0], 2**70, 0)):
        with pytest.raises((RuntimeError, TypeError, OverflowError, ValueError)):
            ops.allgather_param(*wrong)
    assert torch.equal(ops.gather_shard(shards[0], GRAPH, [5, 3]), whole_parameter(0))  # still usable


def test_errors_are_those_of_the_general_way() -> None:
    run_ranks(1, errors)


def others_run(rank: int, world: int) -> None:
    """Rank 1 comes when a thread of rank 0, whose gather waits, has got on."""
    shards, _ = start(rank, world)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        sys.setswitchinterval(100)  # nobody takes the interpreter away
        calls = threading.Event()

        def run() -> None:
            calls.wait()
            for _ in range(1000):
                time.sleep(0)  # lets go of the interpreter
            store.set("the thread has run", "")

        thread = threading.Thread(target=run)
        thread.start()
        calls.set()
        ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)
        thread.join()
    else:
        store.wait(["the thread has run"], datetime.timedelta(seconds=60))
        ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)


@only_on_cpu("on a device the host does not wait")
def test_other_threads_run_while_a_call_waits_for_a_peer() -> None:
    run_ranks(2, others_run)


def release_beside_a_gather(rank: int, world: int) -> None:
    """Rank 1 comes when a thread of rank 0 has got on, though another's gather waits, and a third one for that gather."""
    shards, _ = start(rank, world)
    store = torch.distributed.distributed_c10d._get_default_store()
    gathered = ops.wait_allgather(ops.allgather_param(shards[1], GRAPH, 1), GRAPH, 1)
    if rank == 1:
        store.wait(["the thread has run"], datetime.timedelta(seconds=60))
        ops.allgather_param(shards[0], GRAPH, 0)
        return
    sys.setswitchinterval(100)  # nobody takes the interpreter away

    def begun(call: Callable[[], object]) -> threading.Thread:
        calls = threading.Event()

        def run() -> None:
            calls.set()
            call()

        thread = threading.Thread(target=run)
        thread.start()
        calls.wait()
        return thread

    gathers = begun(lambda: ops.allgather_param(shards[0], GRAPH, 0))
    releases = begun(lambda: ops.release_param(gathered, GRAPH, 1, 1))  # nothing else lets go of the interpreter
    assert gathers.is_alive() and releases.is_alive()
    store.set("the thread has run", "")
    gathers.join()
    releases.join()
    assert dc.stats()["releases"] == 1


@only_on_cpu("on a device the host does not wait")
def test_other_threads_run_while_a_release_waits_for_a_gather() -> None:
    run_ranks(2, release_beside_a_gather, environment={"DEEPCOMPILE_CPU_STREAM": "inline"})


def does_not_hold_it(rank: int, world: int) -> None:
    """Threads that Python does not know make what lets go of the interpreter, while this one holds it."""
    library = ctypes.CDLL(str(pathlib.Path(deepcompile.__file__).parent / "lib" / "libdeepcompile.so"))
    make = ctypes.cast(library._ZN2dc19InterpreterReleasedC1Ev, ctypes.c_void_p)
    holding, waiting = ctypes.PyDLL(None), ctypes.CDLL(None)  # functions of C that are called with it, and without
    for _ in range(50):
        released, thread = (ctypes.c_void_p * 1)(1), ctypes.c_ulong()
        assert holding.pthread_create(ctypes.byref(thread), None, make, released) == 0
        deadline = time.monotonic() + 20
        while released[0] == 1 and time.monotonic() < deadline:
            pass
        assert released[0] is None
        assert waiting.pthread_join(thread, None) == 0


def test_a_thread_without_the_interpreter_does_not_give_away_anothers() -> None:
    run_ranks(1, does_not_hold_it, timeout=60)


def after_a_subinterpreter(rank: int, world: int) -> None:
    import _xxsubinterpreters as subinterpreters  # from 3.13 on: _interpreters

    shards, _ = start(rank, world)
    subinterpreters.destroy(subinterpreters.create())
    gathered = ops.wait_allgather(ops.allgather_param(shards[0], GRAPH, 0), GRAPH, 0)
    ops.wait_allgather(a=gathered, graph_id=GRAPH, id=0)  # the general way comes without the interpreter


def test_calls_go_on_after_a_subinterpreter() -> None:
    pytest.importorskip("_xxsubinterpreters")
    run_ranks(1, after_a_subinterpreter)


def test_torchscript_still_knows_the_operators() -> None:
    def wait(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.dc.wait_allgather(x, 0, 0)

    with pytest.warns(DeprecationWarning):
        assert "dc::wait_allgather" in str(torch.jit.script(wait).graph)
