"""Models that are built without parameter data and made shard by shard."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import deepcompile
from harness import only_on_cpu, run_ranks
from models import Llama

CONFIG = {"zero_optimization": {"stage": 3}, "timeout": 20, "compile": False}


def trains(rank: int, world: int, meta: bool) -> None:
    torch.manual_seed(3 + rank)  # rank 0's counts
    if meta:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(31, 16), nn.LayerNorm(16), nn.Linear(16, 31))
    else:
        with deepcompile.init_sharded():
            model = nn.Sequential(nn.Embedding(31, 16), nn.LayerNorm(16), nn.Linear(16, 31))
    assert all(param.is_meta for param in model.parameters())
    engine = deepcompile.initialize(model, lambda params: torch.optim.SGD(params, lr=0.1), CONFIG)
    state = deepcompile.full_state_dict(model)
    assert state["1.weight"].eq(1).all() and state["0.weight"].std() > 0.5
    assert 0 < state["2.weight"].abs().max() <= 0.25  # as nn.Linear does it
    tokens = torch.arange(8) + rank
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(engine(tokens), tokens)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("meta", [False, True])
def test_a_model_without_data_is_initialised_as_its_modules_do_and_trains(meta: bool) -> None:
    run_ranks(2, trains, meta)


def same_everywhere(rank: int, world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    with deepcompile.init_sharded():
        model = Llama(tied=True)
    assert model.head.weight is model.embed.weight
    deepcompile.shard(model, CONFIG)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    return deepcompile.full_state_dict(model)


def test_values_do_not_depend_on_the_number_of_ranks_and_ties_stay() -> None:
    one, three = run_ranks(1, same_everywhere)[0], run_ranks(3, same_everywhere)
    for name, value in one.items():
        for other in three:
            assert torch.equal(other[name], value), name
    assert one["norm.weight"].eq(1).all()  # from the constructor: RMSNorm of the tests has no reset_parameters


class InitsItself(nn.Module):
    def __init__(self, through_data: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if through_data:
            self.layer.weight.data.fill_(2.0)
        else:
            nn.init.constant_(self.layer.weight, 2.0)


class HalfReset(nn.Module):
    """Its constructor sets what ``reset_parameters`` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(5, 3)), nn.Parameter(torch.full((7,), 3.0))
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data.fill_(1.0)


def own_way(rank: int, world: int) -> None:
    for through_data in (False, True):
        with deepcompile.init_sharded():
            model = InitsItself(through_data)
        with pytest.raises(
            ValueError, match="parameter 'layer.weight' was initialised in place inside init_sharded.*init_fn"
        ):
            deepcompile.shard(model, CONFIG)
    with deepcompile.init_sharded():
        model = InitsItself()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
            nn.init.zeros_(module.bias)

    deepcompile.shard(model, CONFIG, init_fn=init)
    assert model.layer.weight.eq(2).all() and not model.layer.bias.any()

    with deepcompile.init_sharded():
        partly = nn.ModuleList([HalfReset(), nn.Linear(4, 4)])
    deepcompile.shard(partly, CONFIG, init_fn=lambda m: m.weight.data.fill_(5.0) if isinstance(m, nn.Linear) else None)
    assert partly[0].weight.eq(1).all() and partly[0].scale.eq(3).all() and partly[0].count.tolist() == [0, 1, 2, 3]
    assert partly[1].weight.eq(5).all() and 0 < partly[1].bias.abs().max() <= 0.5  # as nn.Linear does

    with torch.device("meta"):
        normed = nn.BatchNorm1d(6)
    deepcompile.shard(normed, CONFIG)
    assert normed.running_var.eq(1).all() and normed.running_mean.eq(0).all() and normed.num_batches_tracked.item() == 0
    with torch.device("meta"):
        unset = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        unset[1].register_buffer("positions", torch.arange(3))
    with pytest.raises(ValueError, match=r"buffer '1\.positions' is on the meta device and neither"):
        deepcompile.shard(unset, CONFIG)

    with torch.device("meta"):
        bare = nn.ParameterList([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="parameter '0' is on the meta device and neither reset_parameters"):
        deepcompile.shard(bare, CONFIG)
    with torch.device("meta"):
        linear = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="pass a function that makes the optimizer"):
        deepcompile.initialize(linear, torch.optim.SGD(linear.parameters()), CONFIG)


def test_an_initialisation_that_cannot_be_repeated_is_an_error_and_init_fn_is_the_way() -> None:
    run_ranks(2, own_way)


def large(rank: int, world: int) -> tuple[int, int]:
    """Bytes of the whole model, and by how much the process has grown at most while it was made."""
    layers, width = 64, 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with deepcompile.init_sharded():
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    deepcompile.shard(model, CONFIG)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    # Less the channels to the other ranks, whose size does not depend on the model.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    grown -= int(status["RssShmem"].split()[0]) * 1024
    return layers * width * width * 4, grown


@only_on_cpu("measures the memory of the process")
def test_a_model_is_made_in_the_memory_of_its_shards() -> None:
    for whole, grown in run_ranks(4, large):
        # Shards and gradient buffers, a quarter each, and one layer whole.
        assert grown < 0.75 * whole, (grown, whole)
