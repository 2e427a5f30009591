"""The engine's short way through an update of fused Adam: the bits of ``optimizer.step()``, and only where it is that."""

from __future__ import annotations

import copy
import functools
import gc
import pathlib
import types
import weakref
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import deepcompile
from deepcompile.sharding import fused_adam, shard_aware_torch
from harness import run_ranks
from models import Llama, seeded

KINDS = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw that maximizes": (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-4}),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    shard_aware_torch.install()


def parameters() -> list[torch.nn.Parameter]:
    generator = seeded(0)
    kinds = [((5, 3), torch.float32), ((7,), torch.float32), ((33,), torch.bfloat16), ((4, 4), torch.float32)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in kinds]


def groups(own: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": own[:3], "lr": 1e-2}, {"params": own[3:], "lr": 3e-2, "weight_decay": 0.0}]


def give_gradients(own: list[torch.nn.Parameter], step: int) -> None:
    generator = seeded(step)
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
        fused_adam.step(optimizers[0])
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


def changes(change: str, optimizer: Any, own: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """What the optimizer trains from now on."""
    if change == "states loaded":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif change == "a state replaced":
        optimizer.state[own[0]] = {key: value.clone() for key, value in optimizer.state[own[0]].items()}
    elif change == "a state emptied":
        optimizer.state[own[0]].clear()
    elif change == "a moment replaced":
        optimizer.state[own[0]]["exp_avg"] = torch.zeros_like(own[0])
    elif change == "a group added":
        more = torch.nn.Parameter(torch.ones(6))
        optimizer.add_param_group({"params": [more], "lr": 0.1})
        return [*own, more]
    elif change == "a parameter exchanged":
        more = torch.nn.Parameter(torch.ones(6))
        optimizer.param_groups[0]["params"][0] = more
        return [more, *own[1:]]
    return own


SHORT = ["states loaded", "a state replaced", "a moment replaced"]  # what needs nothing of PyTorch's own step


@pytest.mark.parametrize("change", [*SHORT, "a state emptied", "a group added", "a parameter exchanged"])
def test_what_changes_between_updates_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [parameters(), parameters()]
    optimizers = [torch.optim.AdamW(groups(own), fused=True) for own in trained]
    calls = calls_of_torch(monkeypatch)
    for step in range(1, 8):
        if step == 5:
            trained = [changes(change, optimizer, own) for optimizer, own in zip(optimizers, trained, strict=True)]
        for own in trained:
            give_gradients(own, step)
        fused_adam.step(optimizers[0])
        before = len(calls)
        optimizers[1].step()
        del calls[before:]
    assert len(calls) == 2 if change in SHORT else len(calls) > 2
    for ours, theirs in zip(*trained, strict=True):
        assert torch.equal(ours, theirs)
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, (ours, theirs), strict=True)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_moments_that_others_have_taken_the_place_of_are_freed() -> None:
    own = parameters()
    optimizer = torch.optim.AdamW(own, fused=True)
    for step in range(1, 4):
        give_gradients(own, step)
        fused_adam.step(optimizer)
    before = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [moment() for moment in before] == [None] * len(own)


def trained_and_known_to_its_parameter() -> weakref.ref[torch.optim.Optimizer]:
    own = parameters()
    optimizer = torch.optim.AdamW(own, fused=True)
    own[0].trained_by = optimizer
    for step in range(1, 4):
        give_gradients(own, step)
        fused_adam.step(optimizer)
    return weakref.ref(optimizer)


def test_an_optimizer_that_its_parameter_refers_to_is_freed_with_it() -> None:
    optimizer = trained_and_known_to_its_parameter()
    gc.collect()
    assert optimizer() is None


def test_gathered_copies_of_what_was_updated_are_out_of_date() -> None:
    own = parameters()
    own[0].full_shape = own[0].shape  # as sharded parameters have it
    optimizer = torch.optim.AdamW(own, fused=True)
    for step in range(1, 5):
        give_gradients(own, step)
        before = own[0]._version
        fused_adam.step(optimizer)
        assert own[0]._version > before


def test_a_sparse_gradient_is_refused_as_the_optimizer_does() -> None:
    own = parameters()[3:]
    optimizer = torch.optim.AdamW(own, fused=True)
    for step in range(1, 4):
        give_gradients(own, step)
        fused_adam.step(optimizer)
    own[0].grad = torch.ones_like(own[0]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        fused_adam.step(optimizer)


def replaces_the_step(optimizer: Any, watcher: str, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = optimizer.step

    def noting(self: Any) -> Any:
        seen.append(1)
        return type(self).step(self)

    if watcher == "replaced step":
        monkeypatch.setattr(optimizer, "step", lambda: (seen.append(1), inner()))
    elif watcher == "replaced step under a scheduler":
        optimizer.step = types.MethodType(noting, optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elif watcher == "wrapper around a scheduler's":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scheduled = optimizer.step
        optimizer.step = functools.wraps(scheduled)(lambda: (seen.append(1), scheduled()))
    else:
        own = type(optimizer).step
        monkeypatch.setattr(type(optimizer), "step", functools.wraps(own)(lambda self: (seen.append(1), own(self))))


REPLACED = [
    "replaced step",
    "replaced step under a scheduler",
    "wrapper around a scheduler's",
    "replaced step of the class",
]


@pytest.mark.parametrize("watcher", ["own hook", "hook of all optimizers", *REPLACED, "amsgrad", "foreach"])
def test_optimizers_that_do_or_show_more_take_their_own_step(watcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()[3:]
    more: dict[str, Any] = {"amsgrad": True, "fused": True} if watcher == "amsgrad" else {"fused": watcher != "foreach"}
    optimizer = torch.optim.AdamW(own, lr=1e-2, **more)
    give_gradients(own, 1)
    fused_adam.step(optimizer)
    calls = calls_of_torch(monkeypatch)
    seen: list[int] = []
    handle = None
    if watcher == "own hook":
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    elif watcher == "hook of all optimizers":
        handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    elif watcher in REPLACED:
        replaces_the_step(optimizer, watcher, seen, monkeypatch)
    fused_adam.step(optimizer)
    if handle is not None:
        handle.remove()
    assert calls == [1]
    assert seen == ([] if watcher in ("amsgrad", "foreach") else [1])


def one_rank(rank: int, world: int, compiled: bool) -> None:
    # On a device kernels are picked by measuring them, and gradients of embeddings are added in any order.
    torch._inductor.config.deterministic = True
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = Llama()
    plain = copy.deepcopy(model)
    kinds, shapes = [type(m) for m in model.modules()], [p.shape for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = deepcompile.initialize(model, optimizer, {"timeout": 20, "compile": compiled})
    forward = torch.compile(plain) if compiled else plain
    assert [type(m) for m in model.modules()] == kinds and [p.shape for p in model.parameters()] == shapes
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        tokens = Llama.batch(seeded(step))
        loss, expected = engine(tokens), forward(tokens)
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
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()}, assign=True)
    assert torch.equal(model.state_dict()["norm.weight"], plain.state_dict()["norm.weight"] + 1)
    model.load_state_dict({name: value.reshape(-1) for name, value in plain.state_dict().items()})
    assert torch.equal(next(iter(model.parameters())), next(iter(plain.parameters()))), "as a rank that gathers has it"
    assert next(iter(model.parameters())) is optimizer.param_groups[0]["params"][0], "the engine's parameters are kept"
    engine.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_rank_trains_the_model_as_it_is_bit_for_bit_as_plain_pytorch(compiled: bool) -> None:
    run_ranks(1, one_rank, compiled, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.convolution(x)).square().mean()


def saves_and_loads(rank: int, world: int, folder: str) -> list[float]:
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = Scaled()
    engine = deepcompile.initialize(
        model, torch.optim.Adam(model.parameters(), lr=0.1), {"timeout": 20, "compile": False}
    )
    model.to(memory_format=torch.channels_last)
    if world == 2:
        engine.load_checkpoint(folder)
    losses = []
    for step in range(4):
        x = torch.randn(2, 3, 5, 5, generator=seeded(step))
        losses.append(engine(x))
        engine.backward(losses[-1])
        engine.step()
        if world == 1 and step == 1:
            engine.save_checkpoint(folder)
    if world == 1:  # back to where it was saved, and the same from there
        engine.load_checkpoint(folder)
        with torch.no_grad():
            for step in (2, 0):
                losses.append(engine(torch.randn(2, 3, 5, 5, generator=seeded(step))))
    counts = {state["step"].shape for state in engine.optimizer.state.values()}
    assert counts == {torch.Size([])}, "a number, also of a parameter that is one"
    return [loss.item() for loss in losses]


def test_one_rank_saves_parameters_of_any_layout_and_no_dimensions(tmp_path: pathlib.Path) -> None:
    [losses] = run_ranks(1, saves_and_loads, str(tmp_path))
    assert losses[4] == pytest.approx(losses[2], rel=1e-6)
    two, _ = run_ranks(2, saves_and_loads, str(tmp_path))
    assert two[0] == pytest.approx(losses[5], rel=1e-5) and losses[5] != pytest.approx(losses[0], rel=1e-3)
