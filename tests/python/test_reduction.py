"""Reductions: owners, bytes, accumulation, missing and repeated gradients, order of arrival."""

from __future__ import annotations

import pytest
import torch

from deepcompile import dc
from harness import DEVICE, run_ranks
from z3_fixture import GRAPH, gather, release, start

ops = torch.ops.dc


def is_mean(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """NCCL multiplies by a third, which is rounded; on CPU the sum of three ranks is divided, and exact here."""
    return torch.equal(found, expected) if DEVICE == "cpu" else torch.allclose(found, expected, rtol=1e-6, atol=0)


def cut_inside_parameters(rank: int, world: int, stage: int, cuts: list[int]) -> tuple[list[torch.Tensor], dict]:
    """Three parameters of 10 elements as one flat vector of 30, cut at ``cuts``; returns this rank's slices."""
    dc.init(None, {"timeout": 20}, 1000)
    buffers = []
    for index in range(3):
        low = min(max(cuts[rank] - 10 * index, 0), 10)
        high = min(max(cuts[rank + 1] - 10 * index, 0), 10)
        buffers.append(torch.full((high - low,), 99.0))
        dc.register_param(index, [2, 5], torch.zeros(2, 5), buffers[index], low, name=f"w{index}")
    (dc.register_graph_z1 if stage == 1 else dc.register_graph_z2)(GRAPH, [0, 1, 2])
    dc.start_forward()
    dc.end_forward()
    dc.start_backward(True)
    for index in (2, 1, 0):
        ops.reduce_grad((torch.arange(10.0) + 10 * index + 100 * rank).view(2, 5), GRAPH, index)
    ops.end_backward(GRAPH)
    return [b.clone() for b in buffers], dc.stats()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("cuts", [[0, 10, 20, 30], [0, 13, 17, 30], [0, 30, 30, 30], [0, 0, 5, 30]])
def test_every_rank_gets_the_mean_of_its_own_slice_wherever_the_cuts_fall(stage: int, cuts: list[int]) -> None:
    world = 3
    mean = torch.arange(30.0) + 100
    presence = 4 * world * 4  # one word per parameter and rank says who had a gradient, one more who had others
    for rank, (slices, stats) in enumerate(run_ranks(world, cut_inside_parameters, stage, cuts)):
        assert is_mean(torch.cat(slices), mean[cuts[rank] : cuts[rank + 1]])
        assert stats["bytes_sent"]["reduce_scatter"] <= 30 * 4 - 4 * (cuts[rank + 1] - cuts[rank]) + presence
        assert stats["bytes_sent"]["all_reduce"] == 0


def collectives_by_microstep(rank: int, world: int, stage: int) -> list[int]:
    dc.init(None, {"timeout": 20}, 1000)
    half = 5
    buffer = torch.zeros(half)
    dc.register_param(0, [10], torch.zeros(10), buffer, half * rank)
    (dc.register_graph_z1 if stage == 1 else dc.register_graph_z2)(GRAPH, [0])
    counts = []
    for update in (False, False, True):
        dc.start_backward(update)
        ops.reduce_grad(torch.arange(10.0) * (rank + 1), GRAPH, 0)
        ops.end_backward(GRAPH)
        counts.append(dc.stats()["collectives"]["reduce_scatter"])
    assert torch.equal(buffer, 3 * 1.5 * torch.arange(10.0)[half * rank : half * (rank + 1)])
    dc.start_backward(True)  # the first reduction after an update overwrites
    ops.reduce_grad(torch.ones(10), GRAPH, 0)
    ops.end_backward(GRAPH)
    assert torch.equal(buffer, torch.ones(half))
    return counts


def test_zero1_communicates_only_in_the_backward_before_an_update() -> None:
    assert run_ranks(2, collectives_by_microstep, 1)[0] == [0, 0, 1]


def test_zero2_communicates_in_every_backward() -> None:
    assert run_ranks(2, collectives_by_microstep, 2)[0] == [1, 2, 3]


def local_gradient_without_one_at_the_boundary(rank: int, world: int) -> None:
    dc.init(None, {"timeout": 20}, 1000)
    buffer = torch.zeros(5)
    dc.register_param(0, [10], torch.zeros(10), buffer, 5 * rank)
    dc.register_graph_z1(GRAPH, [0])
    dc.start_backward(False)
    ops.reduce_grad(torch.full((10,), 4.0), GRAPH, 0)
    ops.end_backward(GRAPH)
    dc.start_backward(True)
    ops.end_backward(GRAPH)
    assert torch.equal(buffer, torch.full((5,), 4.0))


def test_zero1_reduces_what_it_kept_even_without_a_gradient_at_the_boundary() -> None:
    run_ranks(2, local_gradient_without_one_at_the_boundary)


def missing_and_out_of_order(rank: int, world: int) -> None:
    shards, buffers = start(rank, world, count=4, shape=(6,), requires_grad=True)
    orders = {0: [3, 2, 1, 0], 1: [0, 2, 3], 2: [1, 3]}  # ranks 1 and 2 lack some, and rank 1 has another order
    for step in range(3):
        for shard in shards:
            shard.grad = None
        dc.start_backward(True)
        for index in orders[rank]:
            ops.reduce_grad(torch.full((6,), 3.0 * (index + 1) * (step + 1)), GRAPH, index)
        ops.end_backward(GRAPH)
        for index, buffer in enumerate(buffers):
            owners = sum(index in order for order in orders.values())
            assert torch.equal(buffer, torch.full((2,), float((index + 1) * (step + 1) * owners))), (step, index)


def test_a_missing_gradient_counts_as_zero_and_the_order_of_arrival_does_not_matter() -> None:
    run_ranks(3, missing_and_out_of_order)


def nobody_has_a_gradient(rank: int, world: int) -> None:
    shards, _ = start(rank, world, count=3, requires_grad=True)
    dc.start_backward(True)
    ops.reduce_grad(torch.ones(5, 3), GRAPH, 0)
    if rank == 1:
        ops.reduce_grad(torch.ones(5, 3), GRAPH, 2)
    ops.end_backward(GRAPH)
    assert shards[0].grad is not None
    assert shards[1].grad is None
    assert shards[2].grad is not None


def test_a_parameter_that_no_rank_has_a_gradient_for_keeps_none() -> None:
    run_ranks(2, nobody_has_a_gradient)


def parks_nothing_from_the_second_backward_on(rank: int, world: int) -> list[int]:
    start(rank, world, count=5)
    parked = []
    for _ in range(3):
        dc.start_backward(True)
        for index in (2, 0, 4, 1, 3):  # not the reverse of the registration
            ops.reduce_grad(torch.ones(5, 3), GRAPH, index)
        ops.end_backward(GRAPH)
        parked.append(dc.stats()["gradients_parked"])
    return parked


def test_the_order_of_the_first_backward_is_learned() -> None:
    first, second, third = run_ranks(2, parks_nothing_from_the_second_backward_on)[0]
    assert first > 0
    assert first == second == third


def repeated(rank: int, world: int, bucket_size: int) -> None:
    _, buffers = start(rank, world, count=2, shape=(4,), bucket_size=bucket_size)
    for _ in range(3):  # the second backward expects the repetition
        dc.start_backward(True)
        ops.reduce_grad(torch.full((4,), 1.0), GRAPH, 1)
        ops.reduce_grad(torch.full((4,), 10.0 * rank), GRAPH, 0)
        ops.reduce_grad(torch.full((4,), 5.0), GRAPH, 1)
        ops.end_backward(GRAPH)
        assert torch.equal(buffers[1], torch.full((2,), 6.0))
        assert torch.equal(buffers[0], torch.full((2,), 5.0))


@pytest.mark.parametrize("bucket_size", [1, 1000])
def test_several_gradients_of_one_parameter_add_up_within_a_bucket_and_across(bucket_size: int) -> None:
    run_ranks(2, repeated, bucket_size)


def accumulates(rank: int, world: int) -> None:
    _, buffers = start(rank, world, count=1, shape=(4,))
    for update, gradient, expected in ((False, 1.0, 1.0), (True, 2.0, 3.0), (False, 10.0, 10.0), (False, 1.0, 11.0)):
        dc.start_backward(update)
        ops.reduce_grad(torch.full((4,), gradient), GRAPH, 0)
        ops.end_backward(GRAPH)
        assert torch.equal(buffers[0], torch.full_like(buffers[0], expected)), (update, gradient)


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_reduction_after_an_update_overwrites_and_later_ones_add(world: int) -> None:
    run_ranks(world, accumulates)


def plain_loop(rank: int, world: int) -> None:
    """No start_backward and no end_backward: gradients appear and accumulate as in PyTorch."""
    shards, _ = start(rank, world, count=2, requires_grad=True)
    weight = rank + 1.0
    mean = sum(range(1, world + 1)) / world

    def backward() -> None:
        loss = (gather(shards[0], 0) * weight).sum()
        release(0)
        loss.backward()

    def expect(value: float) -> None:
        real = min(max(15 - rank * shards[0].numel(), 0), shards[0].numel())
        assert torch.allclose(shards[0].grad[:real], torch.full((real,), value))

    backward()
    expect(mean)
    assert shards[1].grad is None
    backward()
    expect(2 * mean)
    shards[0].grad = None
    backward()
    expect(mean)
    shards[0].grad.zero_()
    backward()
    expect(mean)
    shards[0].grad = torch.ones_like(shards[0])  # a gradient of the user's own
    backward()
    expect(1 + mean)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_in_the_plain_loop_gradients_appear_and_accumulate_as_in_pytorch(world: int) -> None:
    run_ranks(world, plain_loop)


def sixteen_bits(rank: int, world: int) -> None:
    dc.init(None, {"timeout": 20, "pre_div_reduce": False}, 1000)
    buffer = torch.zeros(2)
    dc.register_z3_param(0, [6], torch.zeros(2), buffer, reduce_dtype=torch.bfloat16)
    dc.register_graph_z3(GRAPH, [0])
    dc.start_backward(True)
    # 256 + 1 + 1 would stay 256 if bf16 were summed in bf16, and the sum of all three is rounded once
    ops.reduce_grad(torch.full((6,), (256.0, 1.0, 1.0)[rank]), GRAPH, 0)
    ops.end_backward(GRAPH)
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, torch.full((2,), 258.0 / 3).bfloat16().float())
    assert dc.stats()["bytes_sent"]["reduce_scatter"] == 2 * 2 * (world - 1) + 2 * 2 * (world - 1)


@pytest.mark.skipif(DEVICE == "cuda", reason="NCCL rounds sums of 16 bits at every hop; docs/cuda.md says what to do")
def test_sixteen_bit_reductions_sum_in_fp32_and_accumulate_in_the_buffers_dtype() -> None:
    run_ranks(3, sixteen_bits)


def two_graphs(rank: int, world: int) -> None:
    """Two graphs of one runtime fill the same bucket in turn, and share a parameter."""
    dc.init(None, {"timeout": 20}, 1000)
    buffers = [torch.zeros(2) for _ in range(3)]
    for index, buffer in enumerate(buffers):
        dc.register_z3_param(index, [4], torch.zeros(2), buffer)
    dc.register_graph_z3(0, [0, 1])
    dc.register_graph_z3(1, [1, 2])
    for _ in range(2):
        dc.start_backward(True)
        ops.reduce_grad(torch.full((4,), 2.0), 1, 2)
        ops.reduce_grad(torch.full((4,), 3.0), 0, 1)
        ops.reduce_grad(torch.full((4,), 4.0 * rank), 1, 1)
        ops.reduce_grad(torch.full((4,), 5.0), 0, 0)
        ops.end_backward(1)
        ops.end_backward(0)
        assert [b[0].item() for b in buffers] == [5.0, 5.0, 2.0]


def test_two_graphs_share_the_buckets_and_a_parameter() -> None:
    run_ranks(2, two_graphs)


def overwrites_what_it_gave(rank: int, world: int) -> None:
    _, buffers = start(rank, world, count=3, shape=(4,))
    dc.start_backward(True)
    for index in (0, 1, 2):  # the reverse is expected: the first two are parked
        gradient = torch.full((4,), index + 1.0)
        ops.reduce_grad(gradient, GRAPH, index)
        gradient.zero_()
    ops.end_backward(GRAPH)
    assert [buffer[0].item() for buffer in buffers] == [1, 2, 3]


def test_a_parked_gradient_does_not_depend_on_its_callers_memory() -> None:
    run_ranks(2, overwrites_what_it_gave)


def surplus_on_one_rank(rank: int, world: int) -> None:
    _, buffers = start(rank, world, count=2, shape=(4,))
    for step in range(3):
        dc.start_backward(True)
        ops.reduce_grad(torch.full((4,), 2.0), GRAPH, 1)
        ops.reduce_grad(torch.full((4,), 4.0), GRAPH, 0)
        for _ in range(step if rank == 1 else 0):
            ops.reduce_grad(torch.full((4,), 6.0), GRAPH, 1)
        ops.end_backward(GRAPH)
        assert [buffer[0].item() for buffer in buffers] == [4, 2 + 3 * step]


@pytest.mark.skipif(DEVICE == "cuda", reason="there they are refused: test_cuda.py")
@pytest.mark.parametrize("stream", ["inline", "worker"])
def test_gradients_that_one_rank_alone_has_more_of_than_expected_are_reduced(stream: str) -> None:
    run_ranks(2, surplus_on_one_rank, environment={"DEEPCOMPILE_CPU_STREAM": stream})


def given_up(rank: int, world: int, plain: bool) -> None:
    shards, buffers = start(rank, world, count=2, shape=(4,), requires_grad=True)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError

    if plain:
        # The order is unknown before the first backward, so both gradients are still waiting when the hook raises.
        x = torch.ones(4, requires_grad=True)
        x.register_hook(fail)
        loss = (gather(shards[0], 0) * 100 + x).sum()
        with pytest.raises(ValueError):
            loss.backward()
        release(0)
        loss = (gather(shards[0], 0) + gather(shards[1], 1)).sum()
        loss.backward()
    else:
        dc.start_backward(True)
        ops.reduce_grad(torch.full((4,), 100.0), GRAPH, 1)
        dc.start_backward(True)
        for index in (1, 0):
            ops.reduce_grad(torch.ones(4), GRAPH, index)
        ops.end_backward(GRAPH)
    assert [buffer[0].item() for buffer in buffers] == [1, 1]


@pytest.mark.parametrize("plain", [True, False])
def test_a_backward_that_was_given_up_leaves_nothing_for_the_next(plain: bool) -> None:
    run_ranks(2, given_up, plain)


def no_gradient_at_one_rank(rank: int, world: int) -> None:
    dc.init(None, {}, 100)
    buffer = torch.zeros(2, 5)
    dc.register_param(0, [10], torch.zeros(10), buffer, 0)
    dc.register_graph_z2(GRAPH, [0])
    for update, gradient, expected in ((False, 3.0, 3.0), (True, 4.0, 7.0), (True, None, 0.0)):
        dc.start_backward(update)
        if gradient is not None:
            ops.reduce_grad(torch.full((10,), gradient), GRAPH, 0)
        ops.end_backward(GRAPH)
        assert torch.equal(buffer, torch.full((2, 5), expected))


def test_one_rank_overwrites_and_adds_like_several_with_a_buffer_of_any_shape() -> None:
    run_ranks(1, no_gradient_at_one_rank)


def buffer_of_two_dimensions(rank: int, world: int) -> None:
    dc.init(None, {"timeout": 20}, 100)
    buffer = torch.zeros(2, 5) if rank == 0 else torch.zeros(0)
    dc.register_param(0, [10], torch.zeros(10), buffer, 0)
    dc.register_graph_z2(GRAPH, [0])
    for update in (False, True):
        dc.start_backward(update)
        ops.reduce_grad(torch.arange(10.0), GRAPH, 0)
        ops.end_backward(GRAPH)
    assert rank == 1 or torch.equal(buffer, 2 * torch.arange(10.0).view(2, 5))


def test_a_gradient_buffer_may_have_any_number_of_dimensions() -> None:
    run_ranks(2, buffer_of_two_dimensions)


def sums_of_small_gradients(rank: int, world: int, stage: int) -> float:
    dc.init(None, {"timeout": 20}, 100)
    buffer = torch.zeros(2)
    dc.register_param(0, [4], torch.zeros(4), buffer, 2 * rank, reduce_dtype=torch.bfloat16)
    (dc.register_graph_z1 if stage == 1 else dc.register_graph_z2)(GRAPH, [0])
    for micro, value in enumerate((256.0, 1.0, 1.0, 1.0, 1.0)):
        dc.start_backward(micro == 4)
        ops.reduce_grad(torch.full((4,), value), GRAPH, 0)
        ops.end_backward(GRAPH)
    return buffer[0].item()


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_add_up_in_the_dtype_of_the_buffer(stage: int) -> None:
    assert run_ranks(2, sums_of_small_gradients, stage) == [260.0, 260.0]


def small_gradients_in_the_plain_loop(rank: int, world: int) -> None:
    dc.init(None, {"timeout": 20}, 100)
    shard = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    buffer = torch.zeros(2)
    dc.register_z3_param(0, [2 * world], shard, buffer)
    dc.register_graph_z3(GRAPH, [0])
    for value in (256.0, 1.0, 1.0, 1.0, 1.0):
        loss = (gather(shard, 0) * value).sum()
        release(0)
        loss.backward()
    assert buffer.tolist() == [260.0, 260.0]
    assert shard.grad.dtype == torch.bfloat16


def test_the_plain_loop_accumulates_in_the_dtype_of_the_buffer() -> None:
    run_ranks(2, small_gradients_in_the_plain_loop)


def sparse(rank: int, world: int) -> None:
    _, buffers = start(rank, world, count=1, shape=(4, 2))
    dc.start_backward(True)
    ops.reduce_grad(torch.eye(4, 2).to_sparse(), GRAPH, 0)
    ops.end_backward(GRAPH)
    assert torch.equal(buffers[0], torch.eye(4, 2).reshape(-1)[4 * rank : 4 * rank + 4])


def test_a_sparse_gradient_is_reduced_as_a_dense_one() -> None:
    run_ranks(2, sparse)


def two_graphs_and_a_missing_gradient(rank: int, world: int) -> str:
    dc.init(None, {"timeout": 3}, 1000)
    for index in range(2):
        dc.register_z3_param(index, [4], torch.zeros(2), torch.zeros(2))
        dc.register_graph_z3(index, [index])
    dc.start_backward(True)
    if rank == 0:
        ops.reduce_grad(torch.ones(4), 1, 1)
    ops.reduce_grad(torch.ones(4), 0, 0)
    with pytest.raises(RuntimeError) as raised:
        ops.end_backward(1)
    return str(raised.value)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="over NCCL a reduction does not carry what it means (docs/cuda.md, limits)"
)
def test_graphs_that_take_turns_in_another_order_on_one_rank_are_an_error_and_never_wrong_numbers() -> None:
    for message in run_ranks(2, two_graphs_and_a_missing_gradient):
        # As the communicators put it: through shared memory, and through a backend of torch.distributed.
        assert "do not mean the same collective" in message or "reduces other parameters than rank" in message
