"""A model that was sharded before its engine is made has one configuration, that of ``shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.config.config import ConfigError
from harness import run_ranks
from models import Run, assert_close, losses_with_engine, train_unsharded

WAYS: dict[str, Any] = {"compile": {"backend": "aot_eager"}, "replay": {"mode": "replay"}, "off": False}


def config(stage: int = 3, way: str = "off", **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "timeout": 20, "compile": WAYS[way], **more}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01)


def goes_on(rank: int, world: int, run: Run, again: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = deepcompile.shard(run.make(), run.config)
    engine = deepcompile.initialize(model, sgd, run.config if again else None)
    assert engine.config is engine.sharding.config
    assert engine.gradient_accumulation_steps() == 2 and engine.config.gradient_clipping == 0.5
    torch.manual_seed(1000 + rank)
    return losses_with_engine(engine, rank, run), deepcompile.full_state_dict(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_an_engine_goes_on_with_the_configuration_of_shard(way: str, stage: int, world: int) -> None:
    settings = config(stage, way, gradient_accumulation_steps=2, gradient_clipping=0.5)
    run = Run("mlp", {}, settings, steps=3)
    losses, parameters = train_unsharded(run, world)
    for again in (True, False):
        for rank, (found, state) in enumerate(run_ranks(world, goes_on, run, again)):
            assert found == pytest.approx(losses[rank], rel=1e-5)
            for name, value in parameters.items():
                if "running" not in name and "num_batches" not in name:
                    assert_close(state[name], value, 1e-5, name)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "stage": (config(2), "'zero_optimization.stage' was 3 and is 2 now"),
    "accumulation": (config(gradient_accumulation_steps=2), "'gradient_accumulation_steps' was 1 and is 2 now"),
    "batch size": (
        config(train_batch_size=8, train_micro_batch_size_per_gpu=2),
        "'gradient_accumulation_steps' was 1 and is 2 now",
    ),
    "precision": (config(bf16={"enabled": True}), "'bf16.enabled' was False and is True now"),
    "several": ({"compile": False, "fp16": {"enabled": True}}, "'fp16.enabled' was .* 'timeout' was 20.0 and is 300.0"),
}


def differs(rank: int, world: int, other: dict[str, Any], message: str) -> None:
    model = deepcompile.shard(nn.Linear(3, 3), config())
    with pytest.raises(ConfigError, match=message):
        deepcompile.initialize(model, sgd, other)
    engine = deepcompile.initialize(model, sgd, config())
    engine.backward(engine(torch.ones(2, 3)).sum())
    assert engine.step()


@pytest.mark.parametrize("what", OTHERS)
def test_another_configuration_than_that_of_shard_is_an_error_that_names_the_keys(what: str) -> None:
    run_ranks(2, differs, *OTHERS[what])


def adds(rank: int, world: int) -> None:
    model = deepcompile.shard(nn.Linear(3, 3), {"timeout": 20})
    told = config(way="compile", memory_budget=1 << 30, gradient_clipping=0.5)
    engine = deepcompile.initialize(model, sgd, told)
    assert engine.sharding.planner.budget == 1 << 30
    assert engine.config is engine.sharding.config is engine.sharding.planner._config
    with pytest.raises(ConfigError, match="'memory_budget' was 1073741824 and is None now"):
        deepcompile.initialize(model, sgd, config())
    again = deepcompile.initialize(model, sgd, told | {"gradient_clipping": 1.0})
    assert (again.config.gradient_clipping, engine.config.gradient_clipping) == (1.0, 0.5)
    group = torch.distributed.new_group([0, 1])
    with pytest.raises(ValueError, match="process_group"):
        deepcompile.initialize(model, sgd, told, process_group=group)
    torch.distributed.barrier(
        group
    )  # a rank that leaves must not take a connection along that its peer is still making


def test_an_engine_may_add_what_nothing_was_made_from_yet() -> None:
    run_ranks(2, adds)
