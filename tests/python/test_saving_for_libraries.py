"""What transformers, PEFT, accelerate and safetensors write of a sharded model is the whole model, or nothing."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="tests/requirements-transformers.txt installs it")
pytest.importorskip("peft", reason="tests/requirements-transformers.txt installs it")
pytest.importorskip("accelerate", reason="tests/requirements-transformers.txt installs it")

import accelerate
import peft
import transformers
from safetensors.torch import load_file, save, save_file, save_model  # before anything is sharded
from torch import nn

import deepcompile
from harness import only_on_cpu, run_ranks
from transformers_models import HFGPT2, HFMixtral

pytestmark = only_on_cpu("libraries write the same from a device")


def config() -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, "timeout": 20, "compile": False}


def sharded(make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return deepcompile.shard(make(), config())


def adapted() -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(HFGPT2.make(), lora)


def accelerator_of(rank: int, world: int) -> Any:
    """As torchrun starts it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return accelerate.Accelerator(cpu=True)


def refuses(rank: int, world: int, folder: str) -> None:
    accelerator = accelerator_of(rank, world)
    model, experts, adapter = sharded(HFGPT2.make), sharded(HFMixtral.make), sharded(adapted)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    on_all = (
        lambda: save_file(model.state_dict(), f"{folder}/a"),
        lambda: save_file({name: value.half() for name, value in model.state_dict().items()}, f"{folder}/a"),
        lambda: save_file(dict(model.named_parameters()), f"{folder}/a"),
        lambda: save({"weight": next(model.parameters())}),
        lambda: save_model(model, f"{folder}/a"),
        lambda: adapter.save_pretrained(f"{folder}/adapter-{rank}"),
    )
    on_main = (
        lambda: model.save_pretrained(f"{folder}/model"),
        lambda: experts.save_pretrained(f"{folder}/experts"),  # it takes weights apart before it writes them
        lambda: accelerator.save_model(model, f"{folder}/accelerate"),
        lambda: accelerator.save_model(model, f"{folder}/accelerate", safe_serialization=False),
        lambda: accelerator.save(accelerator.get_state_dict(model), f"{folder}/b"),
        lambda: accelerator.save_state(f"{folder}/state"),
    )
    for attempt in on_all if rank == 1 else (*on_all, *on_main):
        with pytest.raises((RuntimeError, IndexError), match=r"is sharded by deepcompile.*full_state_dict\(model\)"):
            attempt()
    with pytest.raises(RuntimeError, match="is sharded by deepcompile"):
        accelerator.prepare(model)
    dist.barrier()
    assert not [path for path in pathlib.Path(folder).rglob("*.safetensors") if path.stat().st_size > 0]


def test_libraries_cannot_write_the_parts_of_one_rank(tmp_path) -> None:
    run_ranks(2, refuses, str(tmp_path))


def writes(rank: int, world: int, folder: str) -> None:
    accelerator = accelerator_of(rank, world)
    for number, make in enumerate((HFGPT2.make, HFMixtral.make, adapted)):
        model = sharded(make)
        expected = deepcompile.full_state_dict(model)
        where = f"{folder}/{number}"
        with deepcompile.full_params(model, modifier_rank=None):
            state = accelerator.get_state_dict(model)
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            accelerator.save_model(model, f"{where}-accelerate")
            if rank == 0:
                model.save_pretrained(where)
        dist.barrier()
        if make is adapted:
            adapter = load_file(f"{where}/adapter_model.safetensors")
            other = sharded(make, seed=2)
            before = deepcompile.full_state_dict(other)
            peft.set_peft_model_state_dict(other, adapter)
            after = deepcompile.full_state_dict(other)
            for name, value in after.items():
                assert torch.equal(value, (expected if "lora" in name else before)[name]), name
            continue
        found = transformers.AutoModelForCausalLM.from_pretrained(where).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        written = load_file(f"{where}-accelerate/model.safetensors")
        assert all(torch.equal(written[name], expected[name]) for name in written) and len(written) > 20


def test_libraries_write_whole_models_inside_full_params(tmp_path) -> None:
    run_ranks(2, writes, str(tmp_path))


def one_rank(rank: int, world: int, folder: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = HFGPT2.make()
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters()), config())
    model.save_pretrained(folder)
    save_file({name: value.clone() for name, value in engine.state_dict().items()}, f"{folder}/a")
    accelerator.prepare(model, engine.optimizer)
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")


def test_one_rank_saves_by_every_library_as_it_is(tmp_path) -> None:
    run_ranks(1, one_rank, str(tmp_path))
