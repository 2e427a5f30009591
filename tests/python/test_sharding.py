"""Sharding of modules: what parameters, gradients, state dicts and optimizers look like afterwards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import RankFailed, run_ranks
from models import MLP, Llama, seeded


def made(make, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def config(stage: int = 3, **more) -> dict:
    return {"zero_optimization": {"stage": stage}, "timeout": 20, **more}


def looks(rank: int, world: int, stage: int) -> None:
    model = made(MLP)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    objects = dict(model.named_parameters())
    assert deepcompile.shard(model, config(stage)) is model
    assert {name: id(param) for name, param in model.named_parameters()} == {n: id(p) for n, p in objects.items()}
    for name, param in model.named_parameters():
        if shapes[name].numel() == 0:
            assert param.shape == shapes[name]
            continue
        assert param.full_shape == shapes[name]
        assert param.shape == (-(-shapes[name].numel() // world),)
        assert param.is_leaf and param.grad is None
    assert isinstance(model.layers[0], nn.Linear) and "Linear" in repr(model)
    assert model.layers[0].weight.shape == (13, 7)
    assert not model.layers[1].weight.requires_grad
    loss = model(torch.ones(4, 7) * (rank + 1))
    loss.backward()
    for name, param in model.named_parameters():
        assert (param.grad is None) == (not param.requires_grad), name
        if param.grad is not None:
            assert param.grad.shape == param.shape


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_keep_their_identity_and_hold_a_flat_part(stage: int) -> None:
    run_ranks(2, looks, stage)


def recurrent(rank: int, world: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 6, batch_first=True)
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.conv = nn.Conv1d(6, 6, 3, padding=1)
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
            self.extra = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.rnn(self.conv(x.transpose(1, 2)).transpose(1, 2))
            x = self.norm(self.attention(x, x, x)[0])
            return (x * self.extra[0] + self.extra[1]).square().mean()

    model = made(Odd)
    reference = copy.deepcopy(model)
    deepcompile.shard(model, config())
    x = torch.randn(2, 5, 6, generator=seeded(rank))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for _ in range(3):
        total = torch.zeros(())
        for r in range(world):
            total = total + reference(torch.randn(2, 5, 6, generator=seeded(r))) / world
        total.backward()
        model(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = deepcompile.full_state_dict(model)
    for name, value in reference.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_modules_that_hold_parameters_in_lists_and_parametrizations_train() -> None:
    run_ranks(2, recurrent)


def plain_loop(rank: int, world: int, stage: int) -> None:
    """torch.optim, clipping and accumulation as in any program; against the unsharded model on all batches."""
    model, reference = made(Llama), made(Llama)
    deepcompile.shard(model, config(stage))

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        vectors = [p for p in module.parameters() if len(getattr(p, "full_shape", p.shape)) < 2]
        rest = [p for p in module.parameters() if len(getattr(p, "full_shape", p.shape)) >= 2]
        assert len(vectors) == 5 and len(rest) == 11
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1, "lr": 0.03}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    optimizer, reference_optimizer = optimizer_of(model), optimizer_of(reference)
    for step in range(4):
        for micro in range(2):
            batches = [Llama.batch(seeded(100 * step + 10 * micro + r)) for r in range(world)]
            (sum(reference(batch) for batch in batches) / world).backward()
            loss = model(batches[rank])
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert torch.allclose(norm, expected, rtol=1e-5)
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad(set_to_none=True)
        assert all(param.grad is None for param in model.parameters())
    found = deepcompile.full_state_dict(model)
    for name, value in reference.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plain_loop_with_groups_clipping_and_accumulation_equals_unsharded(stage: int) -> None:
    run_ranks(3, plain_loop, stage)


def norms(rank: int, world: int) -> None:
    from torch.nn.utils.clip_grad import _get_total_norm as imported_before

    model, reference = made(Llama), made(Llama)
    deepcompile.shard(model, config())
    batch = Llama.batch(seeded(0))
    model(batch).backward()
    reference(batch).backward()
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    for kind in (1.0, 2.0, 3.0, float("inf")):
        ours = nn.utils.get_total_norm([p.grad for p in model.parameters()], kind)
        theirs = nn.utils.get_total_norm([p.grad for p in reference.parameters()], kind)
        assert torch.allclose(ours, theirs, rtol=1e-5), kind
        assert torch.equal(imported_before([p.grad for p in model.parameters()], kind), ours)
        mixed = nn.utils.get_total_norm([p.grad for m in (model, plain) for p in m.parameters()], kind)
        theirs = nn.utils.get_total_norm([p.grad for m in (reference, plain) for p in m.parameters()], kind)
        assert torch.allclose(mixed, theirs, rtol=1e-5), kind


def test_norms_over_shards_are_global_and_over_other_tensors_what_they_were() -> None:
    run_ranks(2, norms)


def scaled(rank: int, world: int) -> None:
    model = made(Llama)
    deepcompile.shard(model, config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = deepcompile.full_state_dict(model)
    scaler.scale(model(Llama.batch(seeded()))).backward()
    if rank == 1:
        next(model.parameters()).grad[0] = float("inf")  # one rank overflows: all must skip
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    after = deepcompile.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_grad_scaler_skips_on_all_ranks_when_one_overflows() -> None:
    run_ranks(2, scaled)


def changes_in_place(rank: int, world: int, stage: int) -> None:
    model = made(Llama)
    deepcompile.shard(model, config(stage))
    for change in (
        lambda: model.embed.weight.data.zero_(),
        lambda: nn.init.normal_(model.blocks[0].out.weight),
        lambda: model.norm.weight.detach().fill_(2.0),
    ):
        with pytest.raises(RuntimeError, match=r"parameter '[a-z0-9.]+' .* is sharded: .*full_params"):
            change()

    def doubles(module: nn.Module, args: object, output: object) -> None:
        module.weight.data.mul_(2)

    hook = model.norm.register_forward_hook(doubles)
    with pytest.raises(RuntimeError, match="parameter 'norm.weight' .* is sharded: .*full_params"):
        model(Llama.batch(seeded()))
        model(Llama.batch(seeded()))
    hook.remove()
    sharding_of(model).runtime.clear_all_gathered_params()
    before = torch.ones(16)
    with deepcompile.full_params(model.norm):
        assert model.norm.weight.shape == (16,)
        with torch.no_grad():
            model.norm.weight.mul_(rank + 2)  # what rank 0 holds in the end counts
    assert torch.equal(model.norm.weight, before * 2)
    with deepcompile.full_params(model, modifier_rank=1):
        torch.manual_seed(rank)
        nn.init.normal_(model.embed.weight)
    torch.manual_seed(1)
    assert torch.equal(model.embed.weight, torch.randn(31, 16))
    assert torch.equal(model.head.weight, model.embed.weight)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch cannot tell of writers before 2.13")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_whole_weight_can_be_changed_through_full_params_only(stage: int) -> None:
    run_ranks(2, changes_in_place, stage)


def state_dicts(rank: int, world: int) -> None:
    whole = made(Llama).state_dict()
    model = deepcompile.shard(made(Llama, seed=4), config())
    assert set(model.state_dict()) == set(whole)
    assert model.state_dict()["embed.weight"].shape == (31 * 16 // world,)
    model.load_state_dict(whole)
    for name, value in deepcompile.full_state_dict(model).items():
        assert torch.equal(value, whole[name]), name
    shards = {name: value.clone() for name, value in model.state_dict().items()}
    with deepcompile.full_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not model.embed.weight.any()
    model.load_state_dict(shards)
    assert torch.equal(model.embed.weight, whole["embed.weight"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**whole, "norm.weight": torch.ones(3)})
    for copied in (lambda: copy.deepcopy(model.blocks[0].out), lambda: pickle.dumps(model)):
        with pytest.raises(RuntimeError, match=r"cannot be (copied|pickled).*full_state_dict"):
            copied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(Llama.batch(seeded())).backward()
    optimizer.step()
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.state[model._modules["norm"]._parameters["weight"]]["exp_avg"].shape == (8,)


def test_state_dicts_hold_shards_and_whole_ones_load() -> None:
    run_ranks(2, state_dicts)


def mixed(rank: int, world: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Parameter(torch.randn(3, 5))
            self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
            self.short = nn.Parameter(torch.randn(5).bfloat16())
            self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.table = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x @ self.single).double() * self.wide + self.table
            return (y.float() * self.short.float() * self.complex.abs()).sum()

    model, reference = made(Mixed), made(Mixed)
    deepcompile.shard(model, config())
    x = torch.ones(2, 3) * (rank + 1)
    model(x).backward()
    mean = sum(reference(torch.ones(2, 3) * (r + 1)) for r in range(world)) / world
    mean.backward()
    sharding = sharding_of(model)
    for sharded in sharding.params:
        expected = dict(reference.named_parameters())[sharded.name].grad
        if expected is None:
            assert sharded.param.grad is None
            continue
        assert sharded.param.grad.dtype == expected.dtype
        assert torch.allclose(sharded.param.grad, sharding.slice_of(sharded, expected), rtol=1e-2), sharded.name


def test_parameters_of_several_dtypes_are_gathered_and_reduced_in_their_own() -> None:
    run_ranks(2, mixed)


def late_difference(rank: int, world: int) -> None:
    deepcompile.shard(Llama(layers=1 + rank), config())


def test_ranks_with_different_models_are_told_what_differs() -> None:
    with pytest.raises(RankFailed, match=r"different models: parameter or buffer 8 is 'norm.weight' .* on rank 1"):
        run_ranks(2, late_difference)


def refuses(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters: there is nothing to shard"):
        deepcompile.shard(nn.ReLU(), config())
    with pytest.raises(TypeError, match="shard takes a torch.nn.Module, not int"):
        deepcompile.shard(3)
    with pytest.raises(ValueError, match="'weight' is lazy and has no shape yet"):
        deepcompile.shard(nn.LazyLinear(3), config())
    aliased = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    aliased[1].weight.data = aliased[0].weight.data
    with pytest.raises(ValueError, match="'0.weight' and '1.weight' are different objects over the same memory"):
        deepcompile.shard(aliased, config())
    with pytest.raises(ValueError, match="leaf_modules' names 'Expert'"):
        deepcompile.shard(nn.Linear(3, 3), {"zero_optimization": {"leaf_modules": ["Expert"]}})
    model = deepcompile.shard(nn.Sequential(nn.Linear(3, 3)), {"zero_optimization": {"gather_at_one_rank": True}})
    with pytest.raises(ValueError, match="sharded already"):
        deepcompile.shard(model, config())
    with pytest.raises(ValueError, match="ReLU is not sharded"), deepcompile.full_params(nn.ReLU()):
        pass
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"torch.optim.Adafactor treats a parameter as a whole"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be moved or cast"):
        model.double()
    dist.barrier()


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    run_ranks(1, refuses)


class Routed(nn.Module):
    """Each rank sends its rows to another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x).square().mean()


def routes(rank: int, world: int) -> None:
    model, reference = made(Routed), made(Routed)
    deepcompile.shard(model, {"zero_optimization": {"stage": 3, "leaf_modules": ["Routed"]}, "timeout": 20})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        x = torch.ones(2, 4)
        (sum(reference(x * (r + 1), (r + step) % 3) for r in range(world)) / world).backward()
        model(x * (rank + 1), (rank + step) % 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = deepcompile.full_state_dict(model)
    for name, value in reference.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_a_leaf_module_serves_ranks_that_route_differently() -> None:
    run_ranks(2, routes)
