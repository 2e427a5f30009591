"""What users of DeepSpeed find on an engine, and under which graph ids engines live."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile import dc
from deepcompile.config.config import ConfigError, accumulation_steps, load_config
from deepcompile.engine.loss_scale import LossScale
from deepcompile.safetensors import load_safetensors
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks
from models import Llama, seeded


def config(**more) -> dict:
    return {"timeout": 20, "compile": False, **more}


def batch(seed: int) -> torch.Tensor:
    return Llama.batch(seeded(seed))


def surface(rank: int, world: int, folder: str) -> None:
    model = Llama()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    settings = config(
        train_batch_size=32,
        train_micro_batch_size_per_gpu=4,
        optimizer={"type": "AdamW", "params": {"lr": 0.5}},
        bf16={"enabled": True},
    )
    engine = deepcompile.initialize(
        model,
        config=settings,
        model_parameters=[{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    assert engine.gradient_accumulation_steps() == 4 and engine.train_batch_size() == 32
    assert engine.train_micro_batch_size_per_gpu() == 4 and engine.zero_optimization_stage() == 3
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    assert engine.world_size == 2 and engine.global_rank == rank and engine.training
    assert engine.get_global_grad_norm() is None
    for micro in range(4):
        assert engine.is_gradient_accumulation_boundary() == (micro == 3)
        loss = engine(batch(micro))
        engine.backward(loss * float("nan") if micro == 0 else loss)
        engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (1, 1, 4)
    for micro in range(4):
        engine.backward(engine(batch(micro)))
        engine.step()
    assert (engine.global_steps, engine.steps, engine.micro_steps) == (2, 1, 8)
    assert engine.get_lr() == [0.25, 0.25] and engine.get_global_grad_norm() == engine.grad_norm > 0

    where = engine.save_checkpoint(folder, "best", {"epoch": 3})
    assert os.path.basename(where) == "best"
    assert os.path.basename(engine.save_checkpoint(folder, "best")) == "best-2"
    path, client = engine.load_checkpoint(folder, tag="best")
    assert (path, client) == (where, {"epoch": 3})
    with pytest.raises(TypeError, match="the tag of a checkpoint is its name, not a dict.*client_state=..."):
        engine.save_checkpoint(folder, {"epoch": 3})  # type: ignore[arg-type]
    for bad in ("latest", "", "a/b", ".x"):
        with pytest.raises(ValueError, match="cannot name a checkpoint"):
            engine.save_checkpoint(folder, bad)

    saved = load_safetensors(engine.save_16bit_model(f"{folder}/whole"))
    whole = deepcompile.full_state_dict(engine.module)
    assert set(saved) == set(whole) and saved["norm.weight"].dtype == torch.bfloat16
    assert torch.equal(saved["norm.weight"].float(), whole["norm.weight"].cpu().bfloat16().float())
    assert "norm.weight" in torch.load(engine.save_16bit_model(f"{folder}/whole", "model.bin"))
    with pytest.raises(RuntimeError, match="save_16bit_model: rank 0 could not write .*model.bin/a.safetensors"):
        engine.save_16bit_model(f"{folder}/whole/model.bin", "a.safetensors")  # on all ranks
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in whole.items()})
    assert all(not value.any() for value in deepcompile.full_state_dict(engine.module).values())
    assert dict(engine.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_an_engine_has_what_users_of_deepspeed_look_for(tmp_path) -> None:
    run_ranks(2, surface, str(tmp_path))


def test_batch_sizes_decide_the_accumulation_and_must_fit() -> None:
    def steps(world: int, **keys: int) -> int:
        return accumulation_steps(load_config(keys), world)

    assert steps(2) == 1 and steps(2, gradient_accumulation_steps=3) == 3
    assert steps(2, train_batch_size=8) == 1
    assert steps(2, train_micro_batch_size_per_gpu=4) == 1
    assert steps(2, train_batch_size=24, train_micro_batch_size_per_gpu=4) == 3
    assert steps(2, train_batch_size=24, gradient_accumulation_steps=3) == 3
    all_three = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert steps(2, **all_three) == 3
    with pytest.raises(
        ConfigError, match=r"24, which is not train_micro_batch.* \(4\) x gradient.* \(3\) x 4 ranks = 48"
    ):
        steps(4, **all_three)
    with pytest.raises(ConfigError, match="not train_micro_batch_size_per_gpu .5. x 2 ranks times a whole number"):
        steps(2, train_batch_size=24, train_micro_batch_size_per_gpu=5)
    with pytest.raises(ConfigError, match="7, which 2 ranks cannot share evenly"):
        steps(2, train_batch_size=7)


def test_the_configuration_of_a_deepspeed_user_is_understood_or_answered() -> None:
    found = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_16bit_weights_on_model_save": True,
                "leaf_module": {"classes": ["Experts"], "names": ["model.moe"]},
                "zero_hpz_partition_size": 1,
                "mics_shard_size": -1,
                "memory_efficient_linear": True,
            },
            "compile": {"deepcompile": True, "double_buffer": True, "offload_activation": False},
            "gradient_predivide_factor": 1.0,
            "tensorboard": {"enabled": False},
        }
    )
    assert found.zero_optimization.leaf_modules == ["Experts", "model.moe"] and found.compile.enabled
    with pytest.raises(ConfigError, match="'compile.offload_parameters' is not supported"):
        load_config({"compile": {"deepcompile": True, "offload_parameters": True}})
    with pytest.raises(ConfigError, match="'tensorboard' is not supported: log engine.stats"):
        load_config({"tensorboard": {"enabled": True}})
    with pytest.raises(ConfigError, match="'compile.replan_factor' is 0.5; it must be above 1, or 0"):
        load_config({"compile": {"replan_factor": 0.5}})


def test_the_loss_scale_is_lowered_from_the_overflow_that_hysteresis_says() -> None:
    scale = LossScale(load_config({"fp16": {"enabled": True, "hysteresis": 2, "loss_scale_window": 2}}).fp16)
    found = []
    for overflow in (True, True, True, False, False, True, True):
        scale.update(overflow)
        found.append(scale.value / 2.0**16)
    assert found == [1, 0.5, 0.25, 0.25, 0.5, 0.5, 0.25]


def wrong_arguments(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match=r"'optimizer.params' does not fit torch.optim.Adam: .*adam_w_mode.*AdamW"):
        deepcompile.initialize(
            nn.Linear(2, 2), config=config(optimizer={"type": "Adam", "params": {"adam_w_mode": True}})
        )
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="an optimizer was passed and model_parameters for another"):
        deepcompile.initialize(
            model, torch.optim.SGD(model.parameters()), config(), model_parameters=list(model.parameters())
        )
    with pytest.raises(ValueError, match="there is no optimizer to make it for"):
        deepcompile.initialize(nn.Linear(2, 2), None, config(), lr_scheduler=lambda optimizer: None)
    bare = deepcompile.initialize(nn.Linear(2, 2), None, config())
    with pytest.raises(RuntimeError, match="there is no optimizer; pass one to initialize"):
        bare.get_lr()


def test_arguments_that_contradict_each_other_are_refused() -> None:
    run_ranks(1, wrong_arguments)


def graph_ids(rank: int, world: int) -> None:
    first = deepcompile.shard(nn.Linear(4, 4), config())
    second = deepcompile.shard(nn.Linear(4, 4), config())
    assert sharding_of(first).graph_id == 0 and sharding_of(second).graph_id == 1
    sharding_of(first).close()
    if rank == 1:  # a graph of the program's own, on one rank only
        own = dc.Runtime(torch.distributed.new_group([1], backend="gloo", use_local_synchronization=True), {}, 10)
        own.register_z3_param(0, [2], torch.zeros(2), None)
        own.register_graph_z3(0, [0])
    third = deepcompile.shard(nn.Linear(4, 4), config())
    assert sharding_of(third).graph_id == 2  # free on both
    for model in (second, third):
        model(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"graph 2 is registered already.*an engine's model takes"):
            own.register_graph_z3(2, [0])
        own.cleanup()


def test_an_engine_takes_graph_0_or_the_lowest_id_that_is_free_on_all_ranks() -> None:
    run_ranks(2, graph_ids)


def one_after_another(rank: int, world: int) -> None:
    """A graph id is used again, compiled code and agreements of the engine before are not."""
    for strategy in ("per_block", "on_demand"):
        torch.manual_seed(0)
        model = Llama()
        engine = deepcompile.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"timeout": 60, "compile": {"backend": "aot_eager", "strategy": strategy, "profile_steps": 1}},
        )
        for step in range(3):
            engine.backward(engine(batch(step)))
            engine.step()
        assert engine.sharding.graph_id == 0
        assert engine.sharding.planner.training_step().plan.planned.strategy == strategy
        engine.close()


def test_an_engine_after_another_compiles_and_plans_for_itself() -> None:
    run_ranks(2, one_after_another)


#: In a process of its own: tests import what compilers bring along.
MAKES_AN_ENGINE = """
import sys, torch, torch.distributed as dist, deepcompile
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = "torch._inductor.compile_fx" in sys.modules
engine = deepcompile.initialize(model, optimizer, {"timeout": 20})
print(before, "torch._inductor.compile_fx" in sys.modules)
dist.destroy_process_group()
"""


def test_the_compiler_is_imported_when_the_engine_is_made_and_not_in_the_first_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKES_AN_ENGINE], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["False", "True"]
