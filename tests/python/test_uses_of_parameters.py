"""What programs do with parameters besides training them, through ``model.parameters()`` and through their modules: right,
or an error that names the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks, where_ranks_run
from models import seeded

MODES = ("plain", "off", "compile", "replay")
STEPS = 4


class Two(nn.Module):
    """``b`` may be frozen; ``a`` may have the old spectral norm, whose hook writes its buffers."""

    def __init__(self, spectral: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if spectral:
            self.a = nn.utils.spectral_norm(self.a)
        self.b.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=seeded(10 * number + rank))


def entry(model: nn.Module, name: str) -> nn.Parameter:
    return dict(model.named_parameters())[name]


class Loop:
    """One model that trains, in one of the modes."""

    def __init__(self, mode: str, stage: int, accumulation: int = 1, **model: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(2)
        self.model = Two(**model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = {"zero_optimization": {"stage": stage}, "timeout": 30}
        self.engine: Any = None
        if mode == "plain":
            deepcompile.shard(self.model, config)
        else:
            config |= {
                "gradient_accumulation_steps": accumulation,
                "compile": {"mode": mode, "backend": "aot_eager", "profile_steps": 1},
            }
            self.engine = deepcompile.initialize(self.model, self.optimizer, config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self.engine or self.model)(x)

    def backward(self, loss: torch.Tensor) -> None:
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)

    def step(self) -> None:
        if self.engine is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()

    def close(self) -> None:
        sharding_of(self.model).close()


def loops(stage: int, **options: Any) -> Iterator[tuple[str, Loop]]:
    for mode in MODES:
        loop = Loop(mode, stage, **options)
        yield mode, loop
        loop.close()


# -- losses over weights ------------------------------------------------------------------------------------------------


def penalizes_shards(rank: int, world: int, stage: int) -> None:
    for _, loop in loops(stage):
        loss = loop(batch(rank, 0)).square().mean()
        loss = loss + 0.1 * sum(param.pow(2).sum() for param in loop.model.parameters())
        with pytest.raises(
            RuntimeError, match=rf"computed from parameter '[ab]\.\w+'.*rank {rank} of 2.*model\.[ab]\.\w+ is"
        ):
            loop.backward(loss)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_on_this_ranks_parts_is_an_error_that_says_what_to_read(stage: int) -> None:
    run_ranks(2, penalizes_shards, stage)


def thaws_and_penalizes(rank: int, world: int) -> None:
    loop = Loop("off", 3, frozen=True)
    loop.model.requires_grad_(True)
    loss = loop(batch(rank, 0)).square().mean() + entry(loop.model, "b.bias").sum()
    with pytest.raises(RuntimeError, match=r"computed from parameter 'b\.bias'"):
        loop.backward(loss)


def test_a_penalty_on_a_part_that_trains_only_now_is_an_error() -> None:
    run_ranks(2, thaws_and_penalizes)


def penalty(model: Two) -> torch.Tensor:
    return 0.1 * sum(weight.norm() for layer in (model.a, model.b) for weight in (layer.weight, layer.bias))


def penalizes_weights(rank: int, world: int, stage: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for mode, loop in loops(stage):
        found[mode] = []
        for step in range(STEPS):
            loss = loop(batch(rank, step)).square().mean() + penalty(loop.model)
            found[mode].append(loss.item())
            loop.backward(loss)
            loop.step()
    return found


@where_ranks_run
def penalized_unsharded() -> list[list[float]]:
    torch.manual_seed(2)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[float]] = [[], []]
    for step in range(STEPS):
        losses = [model(batch(rank, step)).square().mean() + penalty(model) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, loss in enumerate(losses):
            found[rank].append(loss.item())
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_on_weights_of_modules_is_that_of_unsharded_training(stage: int) -> None:
    expected = penalized_unsharded()
    for rank, found in enumerate(run_ranks(2, penalizes_weights, stage)):
        for mode in MODES:
            assert found[mode] == pytest.approx(expected[rank], rel=1e-5), mode


# -- what is set through a module ---------------------------------------------------------------------------------------

NAMED = r"parameter 'b\.weight'.*gathered copy.*named_parameters"


def sets_through_modules(rank: int, world: int, stage: int) -> None:
    for _, loop in loops(stage):
        weight = loop.model.b
        with pytest.raises(RuntimeError, match=NAMED):
            weight.weight.grad = torch.zeros(8, 8)
        with torch.no_grad(), pytest.raises(RuntimeError, match=NAMED):
            weight.weight.grad = torch.zeros(8, 8)
        with pytest.raises(RuntimeError, match=r"requires_grad|leaf"):
            weight.weight.requires_grad_(False)
    for mode, loop in loops(stage, frozen=True):
        loop.model.b.weight.requires_grad = True
        with pytest.raises(RuntimeError, match="requires_grad was set on a copy: " + NAMED):
            loop(batch(rank, 0))
        entry(loop.model, "b.weight").requires_grad = True
        if mode == "plain":
            deepcompile.update_trainable(loop.model)
        loop.backward(loop(batch(rank, 0)).square().mean())
        assert entry(loop.model, "b.weight").grad is not None


@pytest.mark.parametrize("stage", [1, 3])
def test_requires_grad_and_grad_of_a_gathered_copy_are_errors_that_name_the_parameter(stage: int) -> None:
    run_ranks(2, sets_through_modules, stage)


def reads_gradients_of_copies(rank: int, world: int) -> None:
    loop = Loop("off", 3, frozen=True)
    weight = loop.model.a.weight
    weight.retain_grad()
    loss = loop(batch(rank, 0)).square().mean() + weight.sum()
    loop.backward(loss)
    assert torch.equal(weight.grad, torch.ones(8, 8))
    frozen = loop.model.b.weight.detach().requires_grad_()  # a tensor of the program's own
    (gradient,) = torch.autograd.grad((frozen * 2).sum(), frozen)
    assert torch.equal(gradient, torch.full((8, 8), 2.0))
    loop(batch(rank, 1))


def test_a_copys_own_gradient_can_be_retained() -> None:
    run_ranks(2, reads_gradients_of_copies)


def freezes_within_an_accumulation(rank: int, world: int, stage: int) -> None:
    for mode in MODES[1:]:
        loop = Loop(mode, stage, accumulation=2)
        for number in range(5):
            loop.backward(loop(batch(rank, number)).square().mean())
            loop.step()
        bias = entry(loop.model, "b.bias")
        bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"requires_grad of 'b\.bias' was changed after 1 of 2 micro-batches"):
            loop(batch(rank, 5))
        bias.requires_grad_(True)
        loop.backward(loop(batch(rank, 5)).square().mean())
        loop.step()
        loop.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_frozen_within_an_accumulation_is_an_error_that_names_it(stage: int) -> None:
    run_ranks(2, freezes_within_an_accumulation, stage)


# -- other memory, and writing past autograd ----------------------------------------------------------------------------


def replaces_data(rank: int, world: int, stage: int) -> None:
    for _, loop in loops(stage):
        param = entry(loop.model, "a.weight")
        with pytest.raises(RuntimeError, match=r"'a\.weight'\.data = .*param\.copy_.*full_params"):
            param.data = param.data * 0.9
        param.data = param.data  # what module.to() does where nothing moves
        torch.Tensor.data.__set__(param, param.detach() * 0.9)  # as code does that knows no class of ours
        with pytest.raises(RuntimeError, match=r"parameter 'a\.weight'.*is not that shard"):
            loop(batch(rank, 0))


@pytest.mark.parametrize("stage", [1, 3])
def test_other_memory_under_a_parameter_is_an_error_that_names_it(stage: int) -> None:
    run_ranks(2, replaces_data, stage)


def halve(param: nn.Parameter) -> None:
    param.data.mul_(0.5)


def halve_a_view(param: nn.Parameter) -> None:
    param.data.view(-1)[:].copy_(param.data.view(-1) * 0.5)


def halve_by_operator(param: nn.Parameter) -> None:
    data = param.data
    data *= 0.5


def halve_by_list(param: nn.Parameter) -> None:
    torch._foreach_mul_([param.data], 0.5)


def halve_into(param: nn.Parameter) -> None:
    torch.mul(param.detach(), 0.5, out=param.data)


def halve_items(param: nn.Parameter) -> None:
    param.data[:] = param.detach() * 0.5


WAYS: tuple[Callable[[nn.Parameter], None], ...] = (
    halve,
    halve_a_view,
    halve_by_operator,
    halve_by_list,
    halve_into,
    halve_items,
)


def writes_data(rank: int, world: int, stage: int) -> None:
    for mode, loop in loops(stage):
        x = batch(rank, 0)
        for way in WAYS:
            with torch.no_grad():
                before = deepcompile.full_state_dict(loop.model)
                loop(x)  # what stays gathered is there now
                for param in loop.model.parameters():
                    way(param)
                half = {name: 0.5 * value for name, value in before.items()}
                expected = torch.func.functional_call(Two(), half, x)
                assert torch.allclose(loop(x), expected, rtol=1e-5, atol=1e-6), (mode, way.__name__)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_through_data_is_read_by_the_next_forward(stage: int) -> None:
    run_ranks(2, writes_data, stage)


def reads_data(rank: int, world: int) -> None:
    loop = Loop("off", 1)
    loop(batch(rank, 0))
    versions = [param._version for param in loop.model.parameters()]
    norms = [param.data.norm().item() + float(param.data.view(-1)[0]) for param in loop.model.parameters()]
    assert len(norms) == 4
    assert [param._version for param in loop.model.parameters()] == versions
    gathers = loop.engine.sharding.runtime.stats()["gathers_launched"]
    loop(batch(rank, 1))
    assert loop.engine.sharding.runtime.stats()["gathers_launched"] == gathers


def test_reading_data_changes_nothing() -> None:
    run_ranks(2, reads_data)


def uses_copies_and_compiled_data(rank: int, world: int) -> None:
    loop = Loop("off", 1)
    param = entry(loop.model, "a.weight")
    copied = copy.deepcopy(param)
    assert copied.full_shape == param.full_shape
    copied.data = torch.zeros_like(copied)  # the program's own
    assert not copied.any() and param.any()

    @torch.compile(backend="aot_eager")
    def average(mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.lerp(mean, value.data, 0.5)

    assert torch.equal(average(torch.zeros(param.shape), param), param.detach() / 2)


def test_copies_of_parameters_and_data_in_compiled_code_are_as_in_pytorch() -> None:
    run_ranks(2, uses_copies_and_compiled_data)


# -- the old spectral norm ----------------------------------------------------------------------------------------------


def with_spectral_norm(rank: int, world: int, stage: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for mode, loop in loops(stage, spectral=True):
        found[mode] = []
        for step in range(STEPS):
            loss = loop(batch(rank, step)).square().mean()
            found[mode].append(loss.item())
            loop.backward(loss)
            loop.step()
            loop.model.eval()
            with torch.no_grad():
                found[mode].append(loop(batch(rank, step)).sum().item())
            loop.model.train()
    return found


@where_ranks_run
def unsharded_with_spectral_norm() -> list[list[float]]:
    models, optimizers = [], []
    for _ in range(2):  # each rank has buffers of its own
        torch.manual_seed(2)
        models.append(Two(spectral=True))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1))
    found: list[list[float]] = [[], []]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss = model(batch(rank, step)).square().mean()
            found[rank].append(loss.item())
            loss.backward()
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([param.grad for param in params]).mean(0)
            for param in params:
                param.grad = mean.clone()
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found[rank].append(model(batch(rank, step)).sum().item())
            model.train()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_old_spectral_norm_trains_as_each_rank_would_unsharded(stage: int) -> None:
    expected = unsharded_with_spectral_norm()
    for rank, found in enumerate(run_ranks(2, with_spectral_norm, stage)):
        for mode in MODES:
            assert found[mode] == pytest.approx(expected[rank], rel=1e-5), mode
