"""What training scripts do around the loop: optimizers of every kind, checkpointing, printing, casting, hooks."""

from __future__ import annotations

import copy
import io
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks
from models import seeded


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "timeout": 20, "compile": {"enabled": False}, **more}


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train_beside_unsharded(
    rank: int,
    world: int,
    stage: int,
    make: Callable[[], nn.Module],
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    steps: int = 3,
) -> None:
    """Trains in the plain loop and compares with one process that sees the batches of all ranks."""
    torch.manual_seed(7)
    model = make()
    reference = copy.deepcopy(model)
    deepcompile.shard(model, config(stage))
    optimizers = optimizer_of(model.parameters()), optimizer_of(reference.parameters())
    for step in range(steps):
        batches = [torch.randn(4, 8, generator=seeded(10 * step + r)) for r in range(world)]
        model(batches[rank]).square().mean().backward()
        for batch in batches:
            (reference(batch).square().mean() / world).backward()
        before_step(model)
        before_step(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = deepcompile.full_state_dict(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    sharding_of(model).close()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 5))


class OldOptimizer(torch.optim.Optimizer):
    """Writes to ``param.data``, as optimizers did before there was ``no_grad``."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.data, alpha=-0.1)


def optimizers(rank: int, world: int) -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        OldOptimizer,
    ]
    for stage in (1, 2, 3):
        for kind in kinds:
            train_beside_unsharded(rank, world, stage, small, kind)


def test_copies_that_stay_gathered_follow_optimizers_that_leave_versions_alone() -> None:
    run_ranks(2, optimizers)


class Checkpointed(nn.Module):
    """A block that is run again in the backward, twice, between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 11), nn.GELU(), nn.Linear(11, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


def reentrant(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        train_beside_unsharded(rank, world, stage, Checkpointed)
    # A backward that fails inside leaves nothing behind for the next one.
    model = deepcompile.shard(Checkpointed(), config(3))
    before = deepcompile.full_state_dict(model)
    block, model.block.forward = model.block.forward, _raises_in_backward
    with pytest.raises(ValueError, match="meant to"):
        model(torch.ones(2, 8)).sum().backward()
    model.block.forward = block
    for param in model.parameters():
        param.grad = None
    model(torch.ones(2, 8)).sum().backward()
    whole = Checkpointed()
    whole.load_state_dict(before)
    whole(torch.ones(2, 8)).sum().backward()
    for name, param in model.named_parameters():
        expected = dict(whole.named_parameters())[name].grad.flatten()
        part = param.grad[: max(0, expected.numel() - rank * param.numel())]
        torch.testing.assert_close(part, expected[rank * param.numel() :][: param.numel()], msg=name)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("meant to")


def _raises_in_backward(x: torch.Tensor) -> torch.Tensor:
    return _Raises.apply(x)


def test_reentrant_checkpointing_in_the_plain_loop_keeps_the_gradients_of_all_layers() -> None:
    run_ranks(2, reentrant)


def retries(rank: int, world: int) -> None:
    """The backward of a micro-batch fails and is tried again: in the middle of an accumulation, and at its end."""
    for stage in (1, 2, 3):
        torch.manual_seed(3)
        model = small()
        reference = copy.deepcopy(model)
        engine = deepcompile.initialize(model, sgd, config(stage, gradient_accumulation_steps=3))
        optimizer = sgd(reference.parameters())
        for step in range(6):
            x = [torch.randn(4, 8, generator=seeded(step * 7 + r)) for r in range(world)]
            if step in (1, 3, 5):
                with pytest.raises(ValueError, match="meant to"):
                    engine.backward(_Raises.apply(engine(x[rank])).sum())
            engine.backward(engine(x[rank]).square().mean())
            engine.step()
            for one in x:
                (reference(one).square().mean() / (3 * world)).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        found = deepcompile.full_state_dict(model)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=f"stage {stage}: {name}")
        engine.close()


def test_a_backward_that_failed_and_is_tried_again_keeps_what_was_accumulated_before_it() -> None:
    run_ranks(2, retries)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64) * 0.3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x.to(torch.complex64) @ self.weight).abs())


def clips_two_models(rank: int, world: int) -> None:
    """One norm over two models that were sharded apart, and a third that was not."""
    torch.manual_seed(5)
    models = [small() for _ in range(3)]
    whole = copy.deepcopy(models)
    for model in models[:2]:
        deepcompile.shard(model, config(3))
    for one in (models, whole):
        for model in one:
            model(torch.ones(2, 8)).sum().backward()
    for norm_type in (2.0, 1.0, float("inf")):
        norms = [
            torch.nn.utils.get_total_norm([p.grad for model in one for p in model.parameters()], norm_type)
            for one in (models, whole)
        ]
        torch.testing.assert_close(*norms)
    for model in models[:2]:
        sharding_of(model).close()


def clips_complex(rank: int, world: int) -> None:
    clip = lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    train_beside_unsharded(rank, world, 3, Complex, before_step=clip)


class Lamb(OldOptimizer):
    """Of another library."""


def around_the_model(rank: int, world: int) -> None:
    model = deepcompile.shard(nn.Sequential(small(), nn.Conv1d(2, 3, 2)), config(3))
    weight = model[0][0]._parameters["weight"]
    if rank == 0:  # one rank alone: nothing may be gathered
        assert "Linear(in_features=8, out_features=13, bias=True)" in repr(model)
        assert "Conv1d(2, 3, kernel_size=(2,), stride=(1,))" in str(model)
    here = torch.get_default_device()
    assert model.to(here) is model and model.float() is model
    for cast in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), lambda m: m.to_empty(device=here)):
        with pytest.raises(
            RuntimeError, match=r"'weight' of a sharded Linear cannot be moved or cast.*before the model"
        ):
            cast(model)
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match=r"parameter '0\.0\.weight'.*param\.grad is the averaged gradient"):
            register(print)
    hooked = nn.Linear(3, 3)
    hooked.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="parameter 'weight' has a hook"):
        deepcompile.shard(hooked, config(3))
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad.*loss\.backward\(\)"):
        torch.autograd.grad(model[0](torch.ones(2, 8)).sum(), list(model[0].parameters()))
    with pytest.raises(RuntimeError, match=r"parameter '0\.0\.weight'.*cannot be pickled.*full_state_dict"):
        torch.save(list(model.parameters()), io.BytesIO())
    ddp = nn.parallel.DistributedDataParallel
    with pytest.raises(RuntimeError, match=r"'0\.0\.weight' is sharded by deepcompile, which averages"):
        ddp(model)
    with pytest.raises(TypeError, match=r"averages gradients itself: shard the model inside it \(\.module\)"):
        deepcompile.shard(ddp(small()), config(3))
    grown = deepcompile.shard(small(), config(3))
    grown.add_module("head", nn.Linear(5, 2).requires_grad_(False))
    optimizer = sgd(grown.parameters())
    grown(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # it is frozen: all ranks have the same
    grown.get_submodule("head").requires_grad_(True)
    grown(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'head\.weight' was added to Sequential after it was sharded"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"test_training_scripts\.Lamb treats a parameter as a whole"):
        deepcompile.initialize(small(), Lamb, config(3))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric"):
        deepcompile.initialize(small(), sgd, config(3), lr_scheduler=plateau)

    other = nn.Sequential(small(), nn.Conv1d(2, 3, 2))
    for tensor in other.state_dict().values():
        dist.broadcast(tensor, 0)
    model.load_state_dict(other.state_dict(), assign=True)  # values, not memory
    assert model[0][0]._parameters["weight"] is weight
    torch.testing.assert_close(model[0](torch.ones(2, 8)), other[0](torch.ones(2, 8)))

    with pytest.raises(RuntimeError, match=r"'0\.0\.weight'\.data = .*param\.copy_\(value\)"):
        weight.data = weight.data.clone()


def trained_inside_full_params() -> None:
    model = deepcompile.shard(small(), config(3))
    with (
        pytest.raises(RuntimeError, match=r"backward ran inside full_params.*'0\.weight'"),
        deepcompile.full_params(model),
    ):
        model(torch.ones(2, 8)).sum().backward()
    with deepcompile.full_params(model, modifier_rank=None):  # only looked at
        model(torch.ones(2, 8)).sum().backward()
        assert model[0].weight.grad.shape == (13, 8)


def traced(rank: int, folder: str) -> None:
    engine = deepcompile.initialize(small(), sgd, config(3))
    with pytest.raises(FileNotFoundError, match="a folder that does not exist"):
        engine.trace(f"{folder}/nowhere/step.json")
    engine.trace(f"{folder}/step.json")  # on every rank, into one file
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    dist.barrier()
    assert (
        len({event["pid"] for event in json.loads(pathlib.Path(folder, "step.json").read_text())["traceEvents"]}) == 1
    )


def around(rank: int, world: int, folder: str) -> None:
    clips_complex(rank, world)
    clips_two_models(rank, world)
    trained_inside_full_params()
    traced(rank, folder)
    around_the_model(rank, world)


def test_printing_casting_hooks_loading_and_tracing_do_what_they_should_or_say_what_to_do(tmp_path) -> None:
    run_ranks(2, around, str(tmp_path))


def adversaries(rank: int, world: int) -> None:
    """Each half is frozen while it passes gradients on to the other."""
    torch.manual_seed(3)
    makes, judges = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), small()
    references = copy.deepcopy(makes), copy.deepcopy(judges)
    for mode in ({"enabled": False}, {"mode": "replay", "profile_steps": 1}, {"backend": "aot_eager"}):
        for stage in (1, 3):
            pair = [copy.deepcopy(model) for model in references]
            whole = [copy.deepcopy(model) for model in references]
            engines = [deepcompile.initialize(model, sgd, config(stage, compile=mode)) for model in pair]
            updates = [sgd(model.parameters()) for model in whole]
            for step in range(4):
                x = [torch.randn(3, 4, generator=seeded(step * 9 + r)) for r in range(world)]
                pair[1].requires_grad_(True)
                fake = engines[0](x[rank]).detach()
                engines[1].backward((engines[1](fake) - engines[1](fake.abs())).square().mean())
                engines[1].step()
                pair[1].requires_grad_(False)
                engines[0].backward(engines[1](engines[0](x[rank])).square().mean())
                engines[0].step()
                for one in x:
                    fake = whole[0](one).detach()
                    ((whole[1](fake) - whole[1](fake.abs())).square().mean() / world).backward()
                updates[1].step()
                for one in x:
                    (whole[1](whole[0](one)).square().mean() / world).backward()
                updates[0].step()
                for update in updates:
                    update.zero_grad()
            for model, reference in zip(pair, whole, strict=True):
                found = deepcompile.full_state_dict(model)
                for name, value in reference.state_dict().items():
                    torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=f"{mode}, {stage}: {name}")
            if "mode" in mode:  # two forwards before a backward are one iteration
                assert engines[1].profile.graph.divergences == 0
            for engine in engines:
                engine.close()


def test_two_engines_train_against_each_other_with_one_frozen_at_a_time() -> None:
    run_ranks(2, adversaries)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag((x.abs() * 5).long() % 20))


def alone(rank: int, world: int) -> None:
    train_beside_unsharded(rank, world, 3, Sparse)
    kept = []

    def used_before() -> nn.Module:
        model = small()
        kept.append(model(torch.ones(2, 8)).sum())  # its graph lives on
        return model

    train_beside_unsharded(rank, world, 3, used_before)


def test_one_rank_trains_sparse_embeddings_and_models_that_ran_before_they_were_sharded() -> None:
    run_ranks(1, alone)
