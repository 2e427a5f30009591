"""Models of the transformers library train sharded as they train unsharded."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests/requirements-transformers.txt installs it")

from models import Run
from test_engine_parity import assert_parity, train_all
from transformers_models import KINDS


def train(rank: int, world: int, runs: list[Run]) -> list:
    import transformers_models  # noqa: F401 - registers the models in the rank's process

    return train_all(rank, world, runs)


def config(kind: str, stage: int, compiles: object, **more) -> dict:
    zero: dict = {"stage": stage, "reduce_bucket_size": 2000}
    if kind == "hf-mixtral":
        zero["leaf_modules"] = ["MixtralSparseMoeBlock"]
    return {"zero_optimization": zero, "timeout": 60, "compile": compiles, "gradient_clipping": 1.0, **more}


@pytest.mark.parametrize("kind", ["hf-gpt2", "hf-mixtral", "hf-lora"])
def test_a_transformers_model_trains_under_zero_three_as_unsharded(kind: str) -> None:
    assert_parity(2, [Run(kind, {}, config(kind, 3, False), steps=6)], worker=train)


def test_a_compiled_transformers_model_trains_under_zero_three_as_unsharded() -> None:
    assert_parity(2, [Run("hf-llama", {}, config("hf-llama", 3, {"backend": "aot_eager"}), steps=6)], worker=train)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_models_train_twenty_steps_under_every_stage_as_unsharded(kind: str, world: int) -> None:
    runs = [
        Run(kind, {}, config(kind, stage, False, gradient_accumulation_steps=accumulation))
        for stage in (1, 2, 3)
        for accumulation in (1, 4)
    ]
    assert_parity(world, runs, worker=train, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_transformers_models_train_twenty_steps_under_every_stage_as_unsharded(kind: str, world: int) -> None:
    runs = [
        Run(kind, {}, config(kind, stage, {"backend": "aot_eager"}, gradient_accumulation_steps=accumulation))
        for stage in (1, 2, 3)
        for accumulation in (1, 4)
    ]
    assert_parity(world, runs, worker=train, timeout=900)


def train_with_inductor(rank: int, world: int, runs: list[Run]) -> list:
    torch._inductor.config.fallback_random = True  # the random numbers of eager mode
    return train(rank, world, runs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_models_compiled_by_inductor_train_twenty_steps_as_unsharded(kind: str) -> None:
    runs = [Run(kind, {}, config(kind, stage, {"backend": "inductor"})) for stage in (1, 3)]
    assert_parity(2, runs, worker=train_with_inductor, timeout=900)
