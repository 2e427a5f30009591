"""The engine trains like one process that runs the ranks' batches in sequence."""

from __future__ import annotations

import pytest

from harness import run_ranks
from models import Run, assert_close, train_unsharded, train_with_engine

TOLERANCE = 1e-5


def train_all(rank: int, world: int, runs: list[Run]) -> list:
    return [train_with_engine(rank, world, run) for run in runs]


def config(stage: int, **more) -> dict:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 500}, "timeout": 60, "compile": False, **more}


def assert_parity(
    world: int, runs: list[Run], tolerance: float = TOLERANCE, worker=train_all, timeout: float = 280
) -> None:
    by_rank = run_ranks(world, worker, runs, timeout=timeout)
    references: dict[str, tuple] = {}
    for index, run in enumerate(runs):
        key = repr((run.model, run.options, run.accumulation, run.clipping, run.steps))
        if key not in references:
            references[key] = train_unsharded(run, world)
        losses, state = references[key]
        for rank in range(world):
            found_losses, found_state, _ = by_rank[rank][index]
            assert found_losses == pytest.approx(losses[rank], rel=tolerance), (run, rank)
            for name, value in state.items():
                if "running" not in name and "num_batches" not in name:  # buffers are each rank's own
                    assert_close(found_state[name], value, 10 * tolerance, f"{name} of {run} on rank {rank}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_twenty_eager_steps_equal_unsharded_training_under_every_stage(world: int) -> None:
    runs = []
    for stage in (1, 2, 3):
        runs.append(Run("mlp", {"dropout": 0.1}, config(stage)))
        runs.append(Run("mlp", {}, config(stage, gradient_accumulation_steps=4, gradient_clipping=0.3)))
        runs.append(Run("llama", {"tied": True}, config(stage, gradient_clipping=0.5)))
        runs.append(
            Run("llama", {"dropout": 0.1, "tied": False}, config(stage, gradient_accumulation_steps=4), steps=5)
        )
    assert_parity(world, runs)


def test_persistent_parameters_and_either_way_of_averaging_give_the_same() -> None:
    kept = {"zero_optimization": {"stage": 3, "param_persistence_threshold": 40}, "compile": False}
    after = {"zero_optimization": {"stage": 2}, "prescale_gradients": False, "compile": False}
    assert_parity(2, [Run("llama", {}, kept, steps=5), Run("llama", {}, after, steps=5)])


def test_debug_mode_gives_the_same() -> None:
    assert_parity(2, [Run("llama", {}, config(stage, debug=True), steps=3) for stage in (1, 2, 3)])
