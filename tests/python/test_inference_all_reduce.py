"""torch.ops.deepspeed.inference_all_reduce, and the calls that set it up."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import deepcompile
import harness
import shm_examples
import shm_fixture as fixture

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
    assert fixture.descriptors() == before
    with pytest.raises(RuntimeError, match="init_distributed"):
        ops.inference_all_reduce(torch.ones(3))


def test_the_documented_examples_run():
    harness.run_ranks(8, examples, environment={"MASTER_PORT": free_port()}, timeout=280)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_in_the_callers_tensor_whatever_its_strides(world):
    harness.run_ranks(world, sums)


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
