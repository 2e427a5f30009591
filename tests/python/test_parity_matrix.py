"""Every front end, under every stage, in every situation of ``situations.py``: equal to unsharded training."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from harness import run_ranks, where_ranks_run
from situations import SITUATIONS, Program, Trainer, Unsharded, WithEngine

#: Configurations of the engine, and whether the models break the graph.
FRONT_ENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "eager": ({"mode": "off"}, False),
    "compile": ({"backend": "aot_eager"}, False),
    "replay": ({"mode": "replay"}, False),
    "breaks": ({"backend": "aot_eager"}, True),
    "inductor": ({"backend": "inductor"}, False),
}

Found = tuple[list[list[float]], list[dict[str, torch.Tensor]]]


@where_ranks_run
def unsharded(situation: str, world: int, breaks: bool) -> Found:
    program = Program(lambda model, steps, before: Unsharded(model, world, steps), lambda model: model, breaks)
    SITUATIONS[situation](program)
    return program.losses, program.states


def on_a_rank(rank: int, world: int, front_end: str, stage: int, situations: list[str]) -> dict[str, Found | str]:
    compiles, breaks = FRONT_ENDS[front_end]
    found: dict[str, Found | str] = {}
    for situation in situations:
        base = {
            "zero_optimization": {"stage": stage, "gather_at_one_rank": True},
            "timeout": 60,
            "compile": {"profile_steps": 2, **compiles},
        }

        def make(model: nn.Module, steps: int, before: bool, base: dict[str, Any] = base) -> Trainer:
            return WithEngine(model, rank, base | {"gradient_accumulation_steps": steps}, before)

        def shard(model: nn.Module, base: dict[str, Any] = base) -> nn.Module:
            return deepcompile.shard(model, base)

        program = Program(make, shard, breaks)
        torch._dynamo.reset()
        try:
            SITUATIONS[situation](program)
            found[situation] = (program.losses, program.states)
        except Exception:
            found[situation] = traceback.format_exc()
            break  # the other ranks may be anywhere
    return found


def differences(world: int, front_end: str, stage: int, situations: list[str]) -> list[str]:
    wrong = []
    by_rank = run_ranks(world, on_a_rank, front_end, stage, situations)
    for situation in situations:
        losses, states = unsharded(situation, world, FRONT_ENDS[front_end][1])
        for rank, found in enumerate(by_rank):
            own = found.get(situation, "did not run")
            what = f"{situation}, rank {rank}"
            if isinstance(own, str):
                wrong.append(f"{what}: {own}")
                continue
            expected = [of_ranks[rank] for of_ranks in losses]
            if [loss for (loss,) in own[0]] != pytest.approx(expected, rel=1e-9, abs=1e-12):
                wrong.append(f"{what}: losses {own[0]} instead of {expected}")
            for mine, theirs in zip(own[1], states, strict=True):
                names = [n for n in theirs if not torch.allclose(mine[n], theirs[n], rtol=1e-9, atol=1e-12)]
                if names or mine.keys() != theirs.keys():
                    wrong.append(f"{what}: other parameters {names or mine.keys() ^ theirs.keys()}")
    return wrong


def assert_equal(world: int, front_end: str, stage: int) -> None:
    wrong = differences(world, front_end, stage, list(SITUATIONS))
    assert not wrong, "\n".join(wrong)


QUICK = [(2, "eager", 1), (2, "compile", 3), (3, "compile", 2), (2, "replay", 3), (2, "breaks", 3)]
ALL = [(world, front_end, stage) for world in (1, 2, 3) for front_end in FRONT_ENDS for stage in (1, 2, 3)]


@pytest.mark.parametrize(("world", "front_end", "stage"), QUICK)
def test_a_front_end_in_every_situation_equals_unsharded(world: int, front_end: str, stage: int) -> None:
    assert_equal(world, front_end, stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "front_end", "stage"), [cell for cell in ALL if cell not in QUICK])
def test_the_rest_of_the_matrix_equals_unsharded(world: int, front_end: str, stage: int) -> None:
    assert_equal(world, front_end, stage)
