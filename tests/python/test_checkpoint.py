"""Checkpoints: a resumed run goes on as if nothing had happened, in any world and stage; a killed save harms nothing."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.__main__ import main
from deepcompile.engine.checkpoint import CheckpointError, consolidate
from deepcompile.safetensors import load_safetensors, save_safetensors
from harness import run_ranks
from models import Llama, seeded


def engine_of(stage: int, seed: int = 5, dropout: float = 0.0, **more) -> deepcompile.Engine:
    torch.manual_seed(seed)
    model = Llama(dropout=dropout)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    config = {"zero_optimization": {"stage": stage}, "timeout": 30, "compile": False, **more}
    return deepcompile.initialize(model, optimizer, config, lr_scheduler=schedule)


def train(engine: deepcompile.Engine, first: int, last: int) -> list[float]:
    """The same batch on every rank, so that the number of ranks does not matter."""
    losses = []
    for step in range(first, last):
        loss = engine(Llama.batch(seeded(step)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def save(rank: int, world: int, folder: str, stage: int) -> list[float]:
    engine = engine_of(stage)
    train(engine, 0, 3)
    where = engine.save_checkpoint(folder, client_state={"epoch": 7})
    assert where.endswith("step-3")
    return train(engine, 3, 6)


def resume(rank: int, world: int, folder: str, stage: int) -> list[float]:
    engine = engine_of(stage, seed=99)
    assert engine.load_checkpoint(folder) == (f"{folder}/step-3", {"epoch": 7})
    assert engine.steps == 3 and engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3)
    return train(engine, 3, 6)


def roll_back(rank: int, world: int, folder: str) -> None:
    engine = engine_of(3)
    engine.save_checkpoint(folder)  # before there is any state
    expected = train(engine, 0, 3)
    engine.load_checkpoint(folder, "step-0")
    assert not engine.optimizer.state
    assert train(engine, 0, 3) == expected
    # An optimizer that does not fit is told so, and left as it was.
    model = Llama()
    other = deepcompile.initialize(model, torch.optim.AdamW(model.parameters()), engine.config)
    train(other, 0, 1)
    before = {param: dict(state) for param, state in other.optimizer.state.items()}
    with pytest.raises(CheckpointError, match="groups hold other parameters"):
        other.load_checkpoint(folder)
    assert {param: dict(state) for param, state in other.optimizer.state.items()} == before


def test_a_checkpoint_from_before_the_first_step_takes_the_optimizer_back_to_nothing(tmp_path) -> None:
    run_ranks(2, roll_back, str(tmp_path))


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (3, 2), (1, 1)])
def test_a_resumed_run_continues_in_another_world_and_stage(tmp_path, world: int, stage: int) -> None:
    expected = run_ranks(2, save, str(tmp_path), 3)[0]
    for losses in run_ranks(world, resume, str(tmp_path), stage):
        assert losses == pytest.approx(expected, rel=1e-5)


def random_state(rank: int, world: int, folder: str) -> None:
    engine = engine_of(3, dropout=0.2)
    torch.manual_seed(100 + rank)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    expected = train(engine, 2, 4)
    engine.load_checkpoint(folder)
    assert train(engine, 2, 4) == expected


def test_random_states_are_restored_in_the_same_world(tmp_path) -> None:
    run_ranks(2, random_state, str(tmp_path))


def scaled(rank: int, world: int, folder: str) -> None:
    more = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
    engine = engine_of(2, **more)
    train(engine, 0, 3)
    assert engine.loss_scale.value == 128
    engine.save_checkpoint(folder)
    other = engine_of(3, **more)
    other.load_checkpoint(folder)
    assert other.loss_scale.value == 128
    train(other, 3, 4)
    assert other.loss_scale.value == 256


def test_the_loss_scale_goes_on_where_it_was(tmp_path) -> None:
    run_ranks(2, scaled, str(tmp_path))


def several(rank: int, world: int, folder: str) -> None:
    engine = engine_of(3, gradient_accumulation_steps=2)
    for _ in range(3):
        engine.save_checkpoint(folder, keep=2)
    if rank == 0:
        assert sorted(os.listdir(folder)) == ["latest", "step-0-2", "step-0-3"]
        assert pathlib.Path(folder, "latest").read_text() == "step-0-3"
    engine.load_checkpoint(folder, "step-0-2")
    with pytest.raises(CheckpointError, match="there is no checkpoint 'step-9' in .*; there are: step-0-2, step-0-3"):
        engine.load_checkpoint(folder, "step-9")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        engine.load_checkpoint(f"{folder}/nowhere")
    other = deepcompile.initialize(nn.Linear(3, 3), None, {"compile": False})
    with pytest.raises(CheckpointError, match=r"belongs to another model: parameter 'weight' is missing there"):
        other.load_checkpoint(folder)
    engine.backward(engine(Llama.batch(seeded())))
    engine.step()
    with pytest.raises(RuntimeError, match="save after the step that ends it"):
        engine.save_checkpoint(folder)


def test_old_checkpoints_are_removed_and_wrong_ones_are_refused(tmp_path) -> None:
    run_ranks(2, several, str(tmp_path))


def parts_beside(rank: int, world: int, folder: str) -> None:
    engine = engine_of(3)
    expected = r"parameter 'embed.weight' of shape \[31, 16\] is sharded.*full_state_dict"
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=expected if rank == 0 else f"rank 0 failed there: RuntimeError: {expected}"):
        engine.save_checkpoint(folder, client_state={"best": engine.state_dict()})
    assert time.monotonic() - begun < 10
    engine.save_checkpoint(folder, client_state={"best": deepcompile.full_state_dict(engine.module)})
    assert engine.load_checkpoint(folder)[1]["best"]["embed.weight"].shape == (31, 16)


def test_parts_in_the_client_state_are_refused_on_all_ranks(tmp_path) -> None:
    run_ranks(2, parts_beside, str(tmp_path))


def whole(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(3)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    return deepcompile.full_state_dict(engine.module)


def loads(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    model = deepcompile.shard(Llama(), {"timeout": 20})
    model.load_state_dict(load_safetensors(path))
    return deepcompile.full_state_dict(model)


def test_consolidated_weights_load_into_plain_and_sharded_models(tmp_path, capsys) -> None:
    expected = run_ranks(3, whole, str(tmp_path / "c"))[0]
    out = tmp_path / "model.safetensors"
    assert main(["consolidate", str(tmp_path / "c"), str(out)]) == 0
    assert "17 tensors written" in capsys.readouterr().out
    found = load_safetensors(out)
    assert set(found) == set(expected)
    model = Llama()
    model.load_state_dict(found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    sharded = run_ranks(2, loads, str(out))[0]
    assert all(torch.equal(sharded[name], value) for name, value in expected.items())
    assert main(["consolidate", str(tmp_path / "nothing"), str(out)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_safetensors_files_keep_every_dtype_and_refuse_damage(tmp_path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(True),
        "d": torch.empty(0, 2),
        "e": torch.arange(6).reshape(2, 3).t(),
    }
    path = tmp_path / "x.safetensors"
    save_safetensors(tensors, path)
    found = load_safetensors(path)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is damaged"):
        load_safetensors(path)
    path.write_bytes(b"12345678901")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_safetensors(path)


SAVES_FOR_EVER = """
import os, sys, torch, torch.distributed as dist
sys.path[:0] = [{tests!r}]
import deepcompile
from test_checkpoint import engine_of, train
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 1), rank=0, world_size=1)
engine = engine_of(3)
step = 0
while True:
    train(engine, step, step + 1)
    step += 1
    engine.save_checkpoint({folder!r}, client_state={{"step": step}}, keep=2)
    print(step, flush=True)
"""


def latest_step(rank: int, world: int, folder: str) -> int:
    engine = engine_of(3)
    step = engine.load_checkpoint(folder)[1]["step"]
    assert engine.steps == step
    return step


def kill_while_saving(tmp_path, times: int) -> None:
    folder = str(tmp_path / "checkpoints")
    choose = random.Random(1)
    for attempt in range(times):
        code = SAVES_FOR_EVER.format(
            tests=os.path.dirname(__file__), store=str(tmp_path / f"store{attempt}"), folder=folder
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        done = 0
        for line in process.stdout:
            done = int(line)
            if done == 2:
                break
        assert done == 2
        time.sleep(choose.uniform(0, 0.15))  # a random moment of one of the next saves
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert run_ranks(1, latest_step, folder)[0] >= 2
        assert consolidate(folder, tmp_path / "out.safetensors") == 17


def test_a_job_that_is_killed_while_saving_leaves_a_checkpoint_that_loads(tmp_path) -> None:
    kill_while_saving(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_jobs_that_are_killed_while_saving_leave_checkpoints_that_load(tmp_path) -> None:
    kill_while_saving(tmp_path, 20)
