"""The engine's short way through an update of fused Adam: the bits of ``optimizer.step()``, and only where it is that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import deepcompile
from deepcompile import _fused_adam, _shard_aware_torch
from harness import run_ranks
from models import Llama

KINDS = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw that maximizes": (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-4}),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    _shard_aware_torch.install()


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    kinds = [((5, 3), torch.float32), ((7,), torch.float32), ((33,), torch.bfloat16), ((4, 4), torch.float32)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in kinds]


def groups(own: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": own[:3], "lr": 1e-2}, {"params": own[3:], "lr": 3e-2, "weight_decay": 0.0}]


def give_gradients(own: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(own):
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if index == 1 and step in (0, 3) else gradient  # one begins late and misses a step


def calls_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each group that PyTorch's own step goes through."""
    calls: list[int] = []
    inner = torch.optim.Adam._init_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "_init_group", counted)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_bitwise_those_of_the_optimizers_own_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, settings = KINDS[kind]
    ours, theirs = parameters(), parameters()
    optimizers = [make(groups(own), fused=True, **settings) for own in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]
    calls = calls_of_torch(monkeypatch)
    through_torch = []
    for step in range(7):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for optimizer in optimizers:
            if step == 4:  # gradients that are not finite: nothing may move, nothing may be counted
                optimizer.found_inf = torch.tensor(1.0)
            elif step >= 3:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        before = len(calls)
        _fused_adam.step(optimizers[0])
        through_torch.append(len(calls) > before)
        optimizers[1].step()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
            schedule.step()
    # The first update of a parameter makes its state.
    assert through_torch == [True, True, False, False, False, False, False]
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        found, expected = (o.state[p] for o, p in zip(optimizers, (own, other), strict=True))
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("watcher", ["own hook", "hook of all optimizers", "replaced step", "amsgrad", "foreach"])
def test_optimizers_that_do_or_show_more_take_their_own_step(watcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()[3:]
    more: dict[str, Any] = {"amsgrad": True, "fused": True} if watcher == "amsgrad" else {"fused": watcher != "foreach"}
    optimizer = torch.optim.AdamW(own, lr=1e-2, **more)
    give_gradients(own, 1)
    _fused_adam.step(optimizer)
    calls = calls_of_torch(monkeypatch)
    seen: list[int] = []
    handle = None
    if watcher == "own hook":
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    elif watcher == "hook of all optimizers":
        handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    elif watcher == "replaced step":
        inner = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda: (seen.append(1), inner()))
    _fused_adam.step(optimizer)
    if handle is not None:
        handle.remove()
    assert calls == [1]
    assert seen == ([] if watcher in ("amsgrad", "foreach") else [1])


def one_rank(rank: int, world: int) -> None:
    """Beside an engine, so that nothing of it can touch the other."""
    torch.manual_seed(0)
    model = Llama()
    plain = copy.deepcopy(model)
    types, shapes = [type(m) for m in model.modules()], [p.shape for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = deepcompile.initialize(model, optimizer, {"timeout": 20, "compile": False})
    assert [type(m) for m in model.modules()] == types and [p.shape for p in model.parameters()] == shapes
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        tokens = Llama.batch(torch.Generator().manual_seed(step))
        loss, expected = engine(tokens), plain(tokens)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        expected.backward()
        engine.step()
        reference.step()
        reference.zero_grad()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    again = Llama()
    again.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model)(tokens), again(tokens))
    model.load_state_dict(plain.state_dict(), assign=True)
    assert next(iter(model.parameters())) is optimizer.param_groups[0]["params"][0], "the engine's parameters are kept"
    engine.close()


def test_one_rank_trains_the_model_as_it_is_bit_for_bit_as_plain_pytorch() -> None:
    run_ranks(1, one_rank)
