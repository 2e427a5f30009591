"""Sharded training gives what unsharded training gives."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness import STREAMS, run_ranks, where_ranks_run
from sharded_model import Setup, train_sharded, train_unsharded


def train_all(rank: int, world: int, setups: list[Setup]) -> list:
    return [train_sharded(rank, world, setup) for setup in setups]


@where_ranks_run
def unsharded(setups: list[Setup], ranks: int) -> list:
    return [train_unsharded(setup, ranks) for setup in setups]


def largest_relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_five_steps_in_fp32_equal_unsharded_training(world: int, stream: str) -> None:
    setups = [
        Setup(stage, accumulation=accumulation, double_buffer=double_buffer)
        for stage, accumulation, double_buffer in itertools.product((1, 2, 3), (1, 3), (True, False))
    ]
    by_rank = run_ranks(world, train_all, setups, environment={"DEEPCOMPILE_CPU_STREAM": stream})
    for index, (setup, (expected, losses)) in enumerate(zip(setups, unsharded(setups, world), strict=True)):
        for rank in range(world):
            found, found_losses, _ = by_rank[rank][index]
            for name, value in expected.items():
                assert largest_relative_difference(found[name], value) <= 1e-6, (setup, rank, name)
            if rank == 0:
                assert found_losses == pytest.approx([losses[i] for i in range(len(found_losses))], rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_training_in_bf16_stays_within_its_rounding(world: int) -> None:
    setups = [Setup(stage, dtype=torch.bfloat16, accumulation=2) for stage in (1, 2, 3)]
    by_rank = run_ranks(world, train_all, setups)
    for index, (setup, (expected, _)) in enumerate(zip(setups, unsharded(setups, world), strict=True)):
        for rank in range(world):
            for name, value in expected.items():
                difference = largest_relative_difference(by_rank[rank][index][0][name].float(), value.float())
                assert difference <= 2**-7, (setup, rank, name)


@pytest.mark.parametrize("world", [2, 3])
def test_the_result_is_the_same_bits_for_every_bucket_size_and_buffering(world: int) -> None:
    setups = [
        Setup(stage, bucket_size=bucket_size, double_buffer=double_buffer, steps=2, accumulation=2)
        for stage in (1, 2, 3)
        for bucket_size in (1, 40, 100_000)
        for double_buffer in (True, False)
    ]
    by_rank = run_ranks(world, train_all, setups)
    first: dict[int, dict[str, torch.Tensor]] = {}
    for index, setup in enumerate(setups):
        for rank in range(world):
            found = by_rank[rank][index][0]
            reference = first.setdefault(setup.stage, found)
            for name, value in found.items():
                assert torch.equal(value, reference[name]), (setup, rank, name)


@pytest.mark.parametrize("pre_div_reduce", [True, False])
def test_both_ways_of_averaging_give_the_mean(pre_div_reduce: bool) -> None:
    setups = [Setup(stage, pre_div_reduce=pre_div_reduce) for stage in (1, 2, 3)]
    by_rank = run_ranks(3, train_all, setups)
    for index, (setup, (expected, _)) in enumerate(zip(setups, unsharded(setups, 3), strict=True)):
        for name, value in expected.items():
            assert largest_relative_difference(by_rank[0][index][0][name], value) <= 1e-6, (setup, name)


def test_training_in_debug_mode_gives_the_same(world: int = 2) -> None:
    setups = [Setup(3, accumulation=2, debug=True), Setup(3, accumulation=2, debug=False)]
    by_rank = run_ranks(world, train_all, setups)
    for rank in range(world):
        checked, plain = by_rank[rank]
        for name, value in plain[0].items():
            assert torch.equal(checked[0][name], value)
