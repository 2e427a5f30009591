"""torch.ops.deepspeed.inference_all_reduce, and the calls that set it up."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.fx.experimental.proxy_tensor
import torch.utils._python_dispatch

import deepcompile
import harness
import shm_examples
import shm_fixture as fixture
from harness import only_on_cpu

pytestmark = only_on_cpu("shared memory of processes")

ops = torch.ops.deepspeed


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def examples(rank: int, world: int) -> None:
    dist.destroy_process_group()
    shm_examples.everything(rank, world)
    assert deepcompile.comm.uses_shared_memory()
    deepcompile.comm.destroy_process_group()


def sums(rank: int, world: int) -> None:
    deepcompile.init_distributed()
    assert deepcompile.comm.uses_shared_memory()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        dtype = fixture.REDUCED[seed % len(fixture.REDUCED)]
        shape = [[5], [0], [], [3, 4], [64, 17], [300, 301], [200_000]][seed % 7]
        everyone = [fixture.values(shape, dtype, generator) for _ in range(world)]
        expected = torch.stack([tensor.double() for tensor in everyone]).sum(0).to(dtype)
        mine = fixture.laid_out(everyone[rank], (seed + rank) % 4) if shape else everyone[rank]
        result = ops.inference_all_reduce(mine)
        assert torch.equal(result, expected) and torch.equal(mine, everyone[rank])
        assert result.stride() == torch.empty_like(mine).stride()
        version = mine._version
        assert ops.inference_all_reduce_(mine).data_ptr() == mine.data_ptr()
        assert torch.equal(mine, expected) and mine._version > version
        with torch.inference_mode():
            assert torch.equal(ops.inference_all_reduce(torch.ones(3)), torch.full((3,), float(world)))
    tensor = torch.full((3,), rank + 1.0)
    assert deepcompile.comm.inference_all_reduce(tensor) is tensor and tensor[0] == world * (world + 1) / 2
    tensor = torch.full((3,), rank + 1.0)
    deepcompile.comm.inference_all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor[0] == world
    with pytest.raises(RuntimeError, match="single memory location"):
        ops.inference_all_reduce_(torch.ones(1).expand(4))


def other_types(rank: int, world: int) -> None:
    """Served by the process group, never returned as they were."""
    deepcompile.init_distributed()
    number = torch.full((3, 2), complex(rank, 1), dtype=torch.complex64)
    expected = torch.full((3, 2), complex(world * (world - 1) / 2, world), dtype=torch.complex64)
    assert torch.equal(ops.inference_all_reduce(number), expected)
    assert torch.equal(ops.inference_all_reduce_(number.t().conj()).conj(), expected.t())
    with pytest.raises(RuntimeError, match="calar type|Float8"):
        ops.inference_all_reduce(torch.ones(3).to(torch.float8_e4m3fn))


def checked(rank: int, world: int) -> None:
    deepcompile.init_distributed()
    for dtype in (torch.float32, torch.bfloat16):
        for tensor in (torch.randn(4, 3).to(dtype), torch.randn(6, 5).to(dtype).t(), torch.randn(9).to(dtype)[::2]):
            torch.library.opcheck(ops.inference_all_reduce.default, (tensor,))
            torch.library.opcheck(ops.inference_all_reduce_.default, (tensor,))


def traced(rank: int, world: int, backend: str) -> None:
    deepcompile.init_distributed()

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 2
        ops.inference_all_reduce_(x)
        ops.inference_all_reduce_(y)  # an input: the caller's tensor changes
        ops.inference_all_reduce(x)  # nobody reads it, and it still takes its turn
        view = x.t()[1:]
        ops.inference_all_reduce_(view)  # through to x
        return x + 1, ops.inference_all_reduce(y.t())

    def inputs() -> list[torch.Tensor]:
        return [torch.full((3, 4), rank + 1.0), torch.arange(6.0).view(2, 3) + rank]

    eager_inputs, traced_inputs = inputs(), inputs()
    eager = step(*eager_inputs)
    found = torch.compile(step, backend=backend, fullgraph=True)(*traced_inputs)
    for one, other in zip((*eager, *eager_inputs), (*found, *traced_inputs), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    dynamic = torch.compile(lambda x: ops.inference_all_reduce(x) + 1, backend=backend, fullgraph=True, dynamic=True)
    for size in (3, 5, 9):
        assert torch.equal(dynamic(torch.ones(size)), torch.full((size,), world + 1.0))


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def called_directly(rank: int, world: int) -> None:
    """deepcompile.comm.inference_all_reduce is the operator, whoever looks at it, and faster where nobody does."""
    torch.set_default_device(None)  # of the harness; it is a mode that sees every function of torch
    reduce = deepcompile.comm.inference_all_reduce
    total = world * (world + 1) / 2

    def mine() -> torch.Tensor:
        return torch.full((3, 4), rank + 1.0)

    expected = torch.full((3, 4), total)
    tensor = mine()
    assert reduce(tensor) is tensor and torch.equal(tensor, expected)  # sets the ranks up by itself
    with torch.profiler.profile(acc_events=True) as profile:
        assert torch.equal(reduce(mine()), expected)
    assert any("inference_all_reduce_" in event.name for event in profile.events())

    calls = []

    def noted(*arguments, **keywords):
        calls.append(arguments)
        return deepcompile.comm._by_operator(*arguments, **keywords)

    deepcompile.runtime.inference.serve_otherwise(noted)
    for size in (0, 1, 256, 40_000):  # the last one lets go of the interpreter at once
        tensor = torch.full((size,), rank + 1.0)
        version = tensor._version
        assert (
            reduce(tensor) is tensor and torch.equal(tensor, torch.full((size,), total)) and tensor._version > version
        )
    with torch.inference_mode():
        assert torch.equal(reduce(mine()), expected)
    with torch.no_grad(), torch.autocast("cpu"):
        assert torch.equal(reduce(mine()), expected)
    assert not calls

    # The operator sees to everything else.
    strided = mine().t()
    assert reduce(strided) is strided and torch.equal(strided, expected.t())
    complex_one = mine().to(torch.complex64)
    assert torch.equal(reduce(complex_one), expected.to(torch.complex64))
    assert torch.equal(reduce(tensor=mine()), expected) and torch.equal(reduce(mine(), dist.ReduceOp.SUM), expected)
    assert torch.equal(reduce(mine(), group=dist.group.WORLD), expected)
    trained = mine().requires_grad_()
    with torch.no_grad():
        reduce(trained)
    assert torch.equal(trained.detach(), expected)
    with Seen() as seen:
        assert torch.equal(reduce(mine()), expected)
    assert "deepspeed::inference_all_reduce_" in seen.names
    marked = mine().as_subclass(Marked)
    reduce(marked)
    assert torch.equal(marked.as_subclass(torch.Tensor), expected) and any("inference" in name for name in Marked.seen)
    with torch.device("cpu"):
        assert torch.equal(reduce(mine()), expected)
    assert len(calls) == 9, len(calls)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(mine())
        assert reduce(fake) is fake
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: reduce(x.clone()) + 1)(mine())
    assert any("inference_all_reduce" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced(mine()), expected + 1)
    with pytest.raises(RuntimeError, match="single memory location"):
        reduce(torch.ones(1).expand(4))
    with pytest.raises((TypeError, AttributeError)):
        reduce([1.0])
    # A group that has been replaced is not used, though somebody still holds it.
    held = dist.group.WORLD
    dist.destroy_process_group()
    before = len(calls)
    reduce(torch.zeros(1))
    assert held is not None and len(calls) == before + 1


def waits_without_the_interpreter(rank: int, world: int) -> None:
    """A call that waits for another rank lets this one's other threads run."""
    torch.set_default_device(None)  # a mode that sees every function of torch
    deepcompile.init_distributed()
    deepcompile.comm.inference_all_reduce(torch.ones(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        calls = threading.Event()

        def run() -> None:
            calls.wait()
            for _ in range(1000):
                time.sleep(0)  # lets go of the interpreter
            store.set("the thread has run", "")

        thread = threading.Thread(target=run)
        thread.start()
        calls.set()
        deepcompile.comm.inference_all_reduce(torch.ones(3))
        thread.join()
    else:
        store.wait(["the thread has run"], datetime.timedelta(seconds=60))
        deepcompile.comm.inference_all_reduce(torch.ones(3))


def compiled_call(rank: int, world: int) -> None:
    deepcompile.init_distributed()

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        deepcompile.comm.inference_all_reduce(x)
        return deepcompile.comm.inference_all_reduce(x + 1) * 2

    mine = torch.full((3, 4), rank + 1.0)
    eager = step(mine)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    assert torch.equal(torch.compile(step, backend=keep, fullgraph=True)(mine), eager)
    assert sum("inference_all_reduce" in str(node.target) for node in graphs[0].graph.nodes) == 2
    assert torch.equal(torch.compile(step, fullgraph=True)(mine), eager)


def initialize_alone(rank: int, world: int, port: str) -> None:
    """Without a process group, from the environment."""
    dist.destroy_process_group()
    dc = deepcompile.dc
    with pytest.raises(RuntimeError, match="init_distributed"):
        ops.inference_all_reduce(torch.ones(3))
    with pytest.raises(ValueError, match="rank must be"):
        dc.initialize(world, world)
    with pytest.raises(RuntimeError, match="MASTER_ADDR and MASTER_PORT"):
        dc.initialize(world, rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_SIZE=str(world + 1))
    with pytest.raises(ValueError, match=f"LOCAL_SIZE is {world + 1}"):
        dc.initialize(world, rank)
    os.environ["LOCAL_SIZE"] = str(world)
    dc.initialize(world, rank)
    assert torch.equal(ops.inference_all_reduce(torch.ones(3)), torch.full((3,), float(world)))
    with pytest.raises(RuntimeError, match="no process group.*init_distributed"):
        ops.inference_all_reduce(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="called already"):
        dc.initialize(world, rank)
    # The port is free again: the process group that comes later may have it.
    dist.init_process_group("gloo", rank=rank, world_size=world)
    deepcompile.init_distributed()
    assert torch.equal(ops.inference_all_reduce(torch.ones(3)), torch.full((3,), float(world)))


def initialize_beside(rank: int, world: int) -> None:
    dc = deepcompile.dc
    os.environ["LOCAL_SIZE"] = "77"  # the process group knows better
    with pytest.raises(ValueError, match=f"rank {rank} of {world}"):
        dc.initialize(world, (rank + 1) % world)
    with pytest.raises(ValueError, match=f"rank {rank} of {world}"):
        dc.initialize(world + 1, rank)
    dc.initialize(world, rank)
    assert deepcompile.comm.uses_shared_memory()
    with pytest.raises(RuntimeError, match="called already"):
        dc.initialize(world, rank)
    assert torch.equal(ops.inference_all_reduce(torch.ones(3)), torch.full((3,), float(world)))


def ends_with_the_process_group(rank: int, world: int, folder: str) -> None:
    dist.destroy_process_group()

    def once(number: int) -> None:
        store = dist.FileStore(os.path.join(folder, str(number)), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
        )
        deepcompile.init_distributed()
        assert ops.inference_all_reduce(torch.ones(2))[0] == world
        dist.destroy_process_group()

    once(0)
    before = fixture.descriptors()
    for number in range(1, 5):
        once(number)
    gc.collect()
    assert fixture.descriptors() <= before
    with pytest.raises(RuntimeError, match="init_distributed"):
        ops.inference_all_reduce(torch.ones(3))


def test_the_documented_examples_run():
    harness.run_ranks(8, examples, environment={"MASTER_PORT": free_port()}, timeout=280)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_in_the_callers_tensor_whatever_its_strides(world):
    harness.run_ranks(world, sums)


def test_the_direct_call_is_the_operator_whoever_looks_at_it():
    harness.run_ranks(2, called_directly)


def test_a_direct_call_that_waits_lets_other_threads_run():
    harness.run_ranks(2, waits_without_the_interpreter)


def test_the_direct_call_traces_as_the_operator():
    harness.run_ranks(2, compiled_call)


def test_types_that_shared_memory_lacks_go_through_the_process_group():
    harness.run_ranks(2, other_types)


def test_the_operators_pass_opcheck():
    harness.run_ranks(2, checked)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_operators_trace_without_a_graph_break(backend):
    harness.run_ranks(2, traced, backend)


def test_initialize_without_a_process_group():
    harness.run_ranks(2, initialize_alone, free_port())


def test_initialize_beside_a_process_group():
    harness.run_ranks(2, initialize_beside)


def test_nothing_is_left_when_the_process_group_has_ended(tmp_path):
    harness.run_ranks(2, ends_with_the_process_group, str(tmp_path))


def test_beside_a_library_that_owns_the_operators_the_import_fails_clearly():
    program = (
        "import torch; library = torch.library.Library('deepspeed', 'DEF')\n"
        "library.define('inference_all_reduce(Tensor self) -> Tensor')\n"
        "import deepcompile"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "ImportError" in outcome.stderr and "torch.ops.deepspeed" in outcome.stderr, outcome.stderr
