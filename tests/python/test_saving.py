"""State dicts of a sharded model: one rank's parts are never written to a file as if they were the model, and what is loaded
is whole, or this rank's own.
"""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

import deepcompile
from deepcompile.sharding.state_shards import StateShard
from harness import run_ranks
from models import Llama, seeded

REFUSED = (
    r"parameter '[\w.]+' of shape \[.*\] is sharded by deepcompile: this tensor is only the part of rank \d of 2.*"
    r"full_state_dict\(model\).*save_16bit_model.*save_checkpoint"
)


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "timeout": 20, "compile": False, **more}


def sharded(seed: int = 3, stage: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return deepcompile.shard(Llama(), config(stage))


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


def pickles(rank: int, world: int, stage: int) -> None:
    model = sharded(stage=stage)
    state = model.state_dict()
    name = "blocks.0.out.weight"
    for attempt in (
        lambda: saved(state),
        lambda: saved({"model": state, "step": 3}),
        lambda: pickle.dumps(state),
        lambda: multiprocessing.reduction.ForkingPickler.dumps(state[name]),
        lambda: multiprocessing.reduction.ForkingPickler.dumps(next(model.parameters())),
        lambda: saved(next(model.parameters())),
        lambda: saved(list(model.parameters())),
        lambda: saved([param.data for param in model.parameters()]),
        lambda: saved(copy.deepcopy(list(model.parameters()))),
        lambda: saved(dict(model.named_parameters())),
        lambda: saved(model.state_dict(keep_vars=True)),
        # What is made of parts is made of parts.
        lambda: saved(copy.deepcopy(state)),
        lambda: saved(copy.copy(state[name])),
        lambda: saved({key: value.detach().cpu().clone() for key, value in state.items()}),
        lambda: saved({key: value.half() for key, value in state.items()}),
        lambda: saved(state[name].data),
        lambda: saved(state[name] * 0.9 + state[name] * 0.1),
        lambda: saved(state[name].chunk(2)),
        lambda: saved(torch.cat([state[name], state[name]])),
        lambda: saved(torch.zeros_like(state[name]).copy_(state[name])),
    ):
        with pytest.raises(RuntimeError, match=REFUSED):
            attempt()
    saved({"norm": state[name].norm(), "count": state[name].numel()})
    saved(deepcompile.full_state_dict(model))
    with deepcompile.full_params(model, modifier_rank=None):
        whole = model.state_dict()
        saved(whole)
        assert whole[name].shape == (16, 16)


@pytest.mark.parametrize("stage", [2, 3])
def test_parts_of_a_model_cannot_be_pickled(stage: int) -> None:
    run_ranks(2, pickles, stage)


def one_rank(rank: int, world: int, more: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = Llama()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = deepcompile.initialize(model, torch.optim.AdamW(model.parameters()), {**config(), **more})
    engine.backward(engine(Llama.batch(seeded())))
    values = [model.state_dict(), engine.optimizer.state_dict()]
    for value in values if more else [*values, list(model.parameters())]:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        assert type(torch.load(file)) is type(value)
    file = io.BytesIO()
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), file)
    file.seek(0)
    found = torch.load(file)
    assert all(type(value) is torch.Tensor and torch.equal(found[key], value) for key, value in expected.items())
    model.load_state_dict(found)
    again = torch.optim.AdamW(model.parameters())
    engine.step()
    again.load_state_dict(engine.optimizer.state_dict())


@pytest.mark.parametrize("more", [{}, {"zero_optimization": {"stage": 3, "gather_at_one_rank": True}}])
def test_one_rank_saves_and_loads_as_plain_pytorch(more: dict[str, Any]) -> None:
    run_ranks(1, one_rank, more)


def best_weights(rank: int, world: int, keep: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    model, other = sharded(), sharded(seed=4)
    expected = deepcompile.full_state_dict(model)
    best = keep(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(Llama.batch(seeded())).backward()
    optimizer.step()
    assert not torch.equal(deepcompile.full_state_dict(model)["norm.weight"], expected["norm.weight"])
    for each in (model, other):
        assert not any(each.load_state_dict(best))
        found = deepcompile.full_state_dict(each)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not any(isinstance(param, StateShard) for param in each.parameters())
    loss = model(Llama.batch(seeded()))
    loss.backward()
    optimizer.step()


def deep_copy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return copy.deepcopy(state)


def clone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def average(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = {name: torch.zeros_like(value) for name, value in state.items()}
    for name, value in state.items():
        kept[name].mul_(0.5).add_(value, alpha=0.5)
        kept[name] = kept[name] + value * 0.5
    return kept


@pytest.mark.parametrize("keep", [deep_copy, clone, average])
def test_own_parts_kept_in_memory_load_again(keep: Callable) -> None:
    run_ranks(2, best_weights, keep)


def foreign(rank: int, world: int) -> None:
    model = sharded()
    state = model.state_dict()
    before = deepcompile.full_state_dict(model)
    name = "blocks.0.out.weight"
    as_large = deepcompile.shard(nn.Linear(32, 8), config()).state_dict()["weight"]
    advice = r"takes whole parameters, here of shape \[16, 16\].*full_state_dict\(model\).*save_checkpoint"
    flat = torch.zeros(state[name].shape)
    for value, found in (
        (flat, r"of shape \[128\], of which nothing says whether it is this rank's part"),
        (torch.zeros(64), r"of shape \[64\]"),
        (torch.zeros(16, 17), r"of shape \[16, 17\]"),
        (
            state["blocks.1.out.weight"][:64],
            r"of shape \[64\], which is a part that rank \d of 2 has of parameter 'blocks",
        ),
        (as_large, r"of shape \[128\], which is a part that rank \d of 2 has of parameter 'weight'"),
        (state["embed.weight"], r"which is a part that rank \d of 2 has of parameter 'embed.weight'"),
    ):
        for strict in (True, False):
            with pytest.raises(
                RuntimeError, match=rf"size mismatch for {name}: rank {rank} was given.*{found}.*{advice}"
            ):
                model.load_state_dict({**state, name: value}, strict=strict)
    after = deepcompile.full_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    with pytest.raises(RuntimeError, match="size mismatch"):
        Llama().load_state_dict(state)


def test_flat_tensors_of_unknown_origin_are_refused_by_name() -> None:
    run_ranks(2, foreign)


def inside_full_params(rank: int, world: int) -> None:
    whole = sharded(seed=9)
    expected = deepcompile.full_state_dict(whole)
    model = sharded()
    with deepcompile.full_params(model):
        model.load_state_dict(expected)
    found = deepcompile.full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_whole_parameters_load_inside_full_params() -> None:
    run_ranks(2, inside_full_params)


def of_torch(rank: int, world: int, folder: str) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = deepcompile.full_state_dict(model)
    for attempt in (
        lambda: get_model_state_dict(model),
        lambda: get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)),
        lambda: get_state_dict(model, optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"rank \d.*flat part.*full_state_dict=True.*save_checkpoint"):
            attempt()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert set(found) == set(expected) and all(torch.equal(found[name], value) for name, value in expected.items())
    saved(found)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert set(found) == (set(expected) if rank == 0 else set())
    for options in (None, StateDictOptions(full_state_dict=True)):
        other = sharded(seed=5)
        set_model_state_dict(other, dict(expected), options=options)
        loaded = deepcompile.full_state_dict(other)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    other = sharded(seed=5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(expected) if rank == 0 else {}, options=options)
    loaded = deepcompile.full_state_dict(other)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    plain = nn.Linear(3, 3)
    assert set(get_model_state_dict(plain)) == {"weight", "bias"}
    with pytest.raises(BaseException, match="is sharded by deepcompile"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/save")
    with pytest.raises(BaseException, match="is sharded by deepcompile"):
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/async").result()


def test_functions_of_torch_for_state_dicts_give_whole_parameters_or_refuse(tmp_path) -> None:
    run_ranks(2, of_torch, str(tmp_path))


def moves(rank: int, world: int, more: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = Llama()
    model.register_buffer("table", torch.arange(3.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepcompile.initialize(model, optimizer, config(**more))
    place = "cpu:0" if engine.sharding.runtime.device.type == "cpu" else "cuda:0"
    memory = [param.data_ptr() for param in model.parameters()]
    engine.backward(engine(Llama.batch(seeded())))
    gradients = [param.grad if param.grad is None else param.grad.clone() for param in model.parameters()]
    for move in (lambda: model.to(place), lambda: model.to(place, torch.float32), lambda: model.blocks[0].to(place)):
        move()
        assert [param.data_ptr() for param in model.parameters()] == memory
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is None or torch.equal(param.grad, gradient)
    engine.step()
    engine.backward(engine(Llama.batch(seeded())))
    engine.step()
    for move in (lambda: model.to("meta"), lambda: model.double(), lambda: model.to_empty(device=place)):
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            move()


@pytest.mark.parametrize(("world", "more"), [(2, {}), (1, {"bf16": {"enabled": True}})])
def test_a_move_to_the_same_place_and_dtype_is_none(world: int, more: dict[str, Any]) -> None:
    run_ranks(world, moves, more)
