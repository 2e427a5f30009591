"""Activations and parameters move to host memory and come back with the same bits."""

from __future__ import annotations

import pytest
import torch

from deepcompile import dc
from harness import run_ranks
from z3_fixture import GRAPH, gather, start, whole_parameter

ops = torch.ops.dc
STREAMS = ("inline", "worker")


def moves_activations(rank: int, world: int) -> None:
    start(rank, world)
    base = torch.randn(6, 5)
    for number, tensor in enumerate((base, base.t(), base[::2], base.bfloat16(), torch.empty(0), torch.tensor(3.0))):
        host = ops.offload_tensor(tensor, GRAPH, number)
        assert ops.wait_offload(host, GRAPH, number) is host
        back = ops.reload_tensor(host, GRAPH, number)
        assert ops.wait_reload(back, GRAPH, number) is back
        assert torch.equal(back, tensor)
        assert back.stride() == torch.empty_like(tensor).stride()
        assert tensor.numel() == 0 or len({t.data_ptr() for t in (tensor, host, back)}) == 3


@pytest.mark.parametrize("stream", STREAMS)
def test_activations_come_back_bit_for_bit(stream: str) -> None:
    run_ranks(2, moves_activations, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def owns_what_it_copies(rank: int, world: int) -> None:
    start(rank, world)
    for number in range(50):
        tensor = torch.full((50_000,), float(number))
        host = ops.offload_tensor(tensor, GRAPH, number)
        del tensor  # the copy in flight holds it
        torch.full((50_000,), -1.0)
        back = ops.reload_tensor(host, GRAPH, number)  # waits for the offload by itself
        assert torch.equal(ops.wait_reload(back, GRAPH, number), torch.full((50_000,), float(number)))


def test_a_copy_in_flight_owns_its_source_and_a_reload_waits_for_its_offload() -> None:
    run_ranks(2, owns_what_it_copies, environment={"DEEPCOMPILE_CPU_STREAM": "worker"})


def passes_gradients(rank: int, world: int) -> None:
    start(rank, world)
    x = torch.randn(3, requires_grad=True)
    host = ops.wait_offload(ops.offload_tensor(x * 2, GRAPH, 0), GRAPH, 0)
    back = ops.wait_reload(ops.reload_tensor(host, GRAPH, 0), GRAPH, 0)
    (back * torch.arange(3.0)).sum().backward()
    assert torch.equal(x.grad, 2 * torch.arange(3.0))


def test_gradients_pass_offload_and_reload() -> None:
    run_ranks(1, passes_gradients)


def moves_parameters(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    kept = shards[0].clone()
    for _ in range(3):
        ops.offload_parameter(shards[0], GRAPH, 0)
        if guarded():
            with pytest.raises(RuntimeError, match="'w0'.*offloaded to host memory; call reload_parameter"):
                shards[0].sum()
        ops.reload_parameter(shards[0], GRAPH, 0)
        assert torch.equal(gather(shards[0], 0), whole_parameter(0))
        dc.clear_all_gathered_params()
    dc.start_backward(True)
    ops.offload_parameter(shards[0], GRAPH, 0)
    ops.reload_parameter(shards[0], GRAPH, 0)
    ops.end_backward(GRAPH)  # the optimizer comes next, and reads the shard itself
    assert torch.equal(shards[0], kept)
    ops.offload_parameter(shards[0], GRAPH, 0)
    assert torch.equal(gather(shards[0], 0), whole_parameter(0))  # a gather brings it back
    assert dc.stats()["bytes_offloaded"] == 5 * kept.nbytes


def guarded() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


@pytest.mark.parametrize("stream", STREAMS)
def test_parameters_move_to_the_host_and_back_into_the_same_tensor(stream: str) -> None:
    run_ranks(2, moves_parameters, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def refuses_views(rank: int, world: int) -> None:
    dc.init(None, {"timeout": 20}, 10)
    dc.register_z3_param(0, [4], torch.zeros(100)[: 4 // world], None, name="view")
    dc.register_graph_z3(GRAPH, [0])
    with pytest.raises(RuntimeError, match="'view'.*view into a storage of 400 bytes"):
        ops.offload_parameter(torch.empty(0), GRAPH, 0)


def test_a_shard_that_is_a_view_cannot_be_offloaded() -> None:
    run_ranks(2, refuses_views)


def frees_activations(rank: int, world: int) -> None:
    start(rank, world, config={"free_activation_threshold": 100})
    small, large = torch.ones(100), torch.ones(101)
    ops.free_tensors([small, large])
    assert small.sum() == 100
    assert large.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="read after free_tensors freed it"):
        large.sum()
    assert dc.stats()["activations_freed"] == 1


def test_free_tensors_frees_what_is_larger_than_the_threshold() -> None:
    run_ranks(1, frees_activations)
