"""Eager training: what autograd saves, whatever the user does around it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepcompile import dc
from harness import run_ranks
from z3_fixture import GRAPH, gather, release, start, whole_parameter

ops = torch.ops.dc


def expected_x_grad(rows: int) -> torch.Tensor:
    return whole_parameter(0).sum(0).expand(rows, 3)


def plain_loop(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=True)
    for _ in range(2):
        x = torch.ones(2, 3, requires_grad=True)
        y = x @ gather(shards[0], 0).t()
        release(0)
        y.sum().backward()
        assert torch.equal(x.grad, expected_x_grad(2))
    assert dc.stats()["gathered_bytes_live"] == 0


@pytest.mark.parametrize("world", [1, 2])
def test_the_plain_loop_needs_no_start_forward(world: int) -> None:
    run_ranks(world, plain_loop)


def frozen_parameter(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=False)
    x = torch.ones(2, 3, requires_grad=True)
    y = x @ gather(shards[0], 0).t()
    release(0)
    y.sum().backward()
    assert torch.equal(x.grad, expected_x_grad(2))


def test_a_frozen_parameter_is_gathered_again_for_the_gradients_of_others() -> None:
    run_ranks(2, frozen_parameter)


def checkpoints(rank: int, world: int, use_reentrant: bool) -> None:
    shards, _ = start(rank, world, requires_grad=True)

    def layer(x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.tanh(x @ gather(shards[index], index).t()) @ x.new_ones(5, 3)
        release(index)
        return y

    def run(checkpointed: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for shard in shards:
            shard.grad = None
        x = torch.full((2, 3), 0.1 * (rank + 1), requires_grad=True)
        h = x
        dc.start_forward()
        for index in range(3):
            h = checkpoint(layer, h, index, use_reentrant=use_reentrant) if checkpointed else layer(h, index)
        dc.end_forward()
        dc.start_backward(True)
        h.sum().backward()
        ops.end_backward(GRAPH)
        assert dc.stats()["gathered_bytes_live"] == 0
        return x.grad, [shard.grad.clone() for shard in shards]

    plain, checked = run(False), run(True)
    assert torch.allclose(checked[0], plain[0])
    for found, expected in zip(checked[1], plain[1], strict=True):
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients_and_leaves_nothing_gathered(use_reentrant: bool) -> None:
    run_ranks(2, checkpoints, use_reentrant)


def changed_in_place(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    x = torch.ones(2, 3, requires_grad=True)
    dc.start_forward()
    w = gather(shards[0], 0)
    w.mul_(2)
    y = x @ w.t()
    dc.end_forward()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * expected_x_grad(2))


def test_a_parameter_changed_in_place_is_saved_as_it_is() -> None:
    run_ranks(1, changed_in_place)


def gathered_for_inference(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=True)
    dc.set_persistent(0)
    with torch.inference_mode():
        gather(shards[0], 0)
        release(0)
    dc.start_forward()
    loss = gather(shards[0], 0).sum()
    release(0)
    dc.end_forward()
    dc.start_backward(True)
    loss.backward()
    ops.end_backward(GRAPH)
    assert dc.stats()["gathers_launched"] == 1
    assert shards[0].grad is not None and shards[0].grad[0] == 1


def test_a_copy_gathered_for_inference_serves_training() -> None:
    run_ranks(2, gathered_for_inference)


def another_runtime(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    x = torch.ones(2, 3, requires_grad=True)
    dc.start_forward()
    y = x @ gather(shards[0], 0).t()
    release(0)
    dc.end_forward()
    dc.cleanup()
    start(rank, world)
    with pytest.raises(RuntimeError, match="from a runtime that was cleaned up since its forward"):
        y.sum().backward()


def test_a_backward_after_cleanup_is_an_error_and_not_another_parameter() -> None:
    run_ranks(1, another_runtime)


def other_hooks(rank: int, world: int) -> None:
    shards, _ = start(rank, world)
    with pytest.raises(ValueError), torch.autograd.graph.save_on_cpu():
        dc.start_forward()
        raise ValueError
    for _ in range(2):
        x = torch.ones(2, 3, requires_grad=True)
        dc.start_forward()
        y = x @ gather(shards[0], 0).t()
        release(0)
        dc.end_forward()
        y.sum().backward()
        assert torch.equal(x.grad, expected_x_grad(2))
    torch.func.grad(lambda t: t.sum())(torch.ones(3))  # which refuses to run while default hooks are on


def test_default_hooks_of_the_user_and_exceptions_under_them_disturb_nothing() -> None:
    run_ranks(1, other_hooks)


def retains(rank: int, world: int) -> None:
    shards, _ = start(rank, world, requires_grad=True, config={"debug": True})
    dc.start_forward()
    loss = (gather(shards[0], 0) * 2).sum()
    release(0)
    dc.end_forward()
    for update in (False, True):
        dc.start_backward(update)
        loss.backward(retain_graph=True)
        ops.end_backward(GRAPH)
    assert shards[0].grad[0] == 4


def test_a_retained_graph_may_run_twice_also_in_debug_mode() -> None:
    run_ranks(2, retains)
