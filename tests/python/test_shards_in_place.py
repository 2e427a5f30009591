"""Within a known step no rank changes a shard, so parameters are read where the ranks' shards lie: nothing is copied, and
nobody reads a shard that its owner is changing.
"""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

import deepcompile
from harness import only_on_cpu, run_ranks, where_ranks_run
from models import seeded

pytestmark = only_on_cpu("reads shards where other processes have them")

#: Weights of 64 x 64: a rank's part of one is whole pages on two and four ranks. The biases are gathered by copying.
SIZE, LAYERS = 64, 3
MODES = {
    "inductor": {"backend": "inductor", "profile_steps": 1},
    "compile": {"backend": "aot_eager", "profile_steps": 1},
    "replay": {"mode": "replay", "profile_steps": 1},
}


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    # As large as a weight, so that a compiler that takes memory again for something else could take a weight's.
    return torch.randn(SIZE, SIZE, generator=seeded(100 * step + rank))


def engine_of(mode: str, stage: int = 3, bias: bool = True, **more: object) -> deepcompile.Engine:
    model = Model(bias)
    config = {"zero_optimization": {"stage": stage}, "timeout": 60, "compile": MODES[mode], **more}
    return deepcompile.initialize(model, torch.optim.Adam(model.parameters(), lr=0.01), config)


def train(engine: deepcompile.Engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(10 * step + micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


@where_ranks_run
def unsharded(world: int, steps: int, accumulation: int, bias: bool = True) -> list[list[float]]:
    model = Model(bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        for micro in range(accumulation):
            for rank in range(world):
                loss = model(batch(10 * step + micro, rank))
                (loss / (world * accumulation)).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_place(rank: int, world: int, mode: str, stage: int, accumulation: int) -> tuple[list[float], int, int]:
    engine = engine_of(mode, stage, gradient_accumulation_steps=accumulation)
    losses = train(engine, rank, range(3))
    before = engine.stats()
    losses += train(engine, rank, range(3, 6))
    after = engine.stats()
    launched, in_place = (after[key] - before[key] for key in ("gathers_launched", "gathers_in_place"))
    return losses, launched, in_place


@pytest.mark.parametrize(
    ("mode", "world", "stage", "accumulation"),
    [("inductor", 2, 3, 1), *((mode, *rest) for mode in ("compile", "replay") for rest in ((4, 3, 2), (2, 1, 2)))],
)
def test_weights_are_read_where_the_shards_lie_and_train_as_unsharded(
    mode: str, world: int, stage: int, accumulation: int
) -> None:
    expected = unsharded(world, 6, accumulation)
    for rank, (losses, launched, read_in_place) in enumerate(run_ranks(world, in_place, mode, stage, accumulation)):
        assert losses == pytest.approx(expected[rank], rel=1e-5)
        # Every weight at least once in a step; the biases are copied.
        assert 3 * LAYERS <= read_in_place < launched


def on_one_rank(rank: int, world: int, mode: str) -> tuple[list[float], int, int]:
    model = Model()
    config = {"zero_optimization": {"stage": 3, "gather_at_one_rank": True}, "compile": MODES[mode]}
    engine = deepcompile.initialize(model, torch.optim.Adam(model.parameters(), lr=0.01), config)
    losses = train(engine, rank, range(6))
    stats = engine.stats()
    return losses, stats["gathers_launched"], stats["gathers_in_place"]


@pytest.mark.parametrize("mode", ["inductor", "replay"])
def test_on_one_rank_parameters_of_any_size_are_read_in_place(mode: str) -> None:
    [(losses, launched, read_in_place)] = run_ranks(1, on_one_rank, mode)
    assert losses == pytest.approx(unsharded(1, 6, 1)[0], rel=1e-5)
    assert launched >= 6 * 2 * LAYERS  # a weight and a bias each
    # The first steps of a replay are recorded, and gather on demand.
    assert read_in_place == launched if mode == "inductor" else read_in_place >= 2 * 2 * LAYERS


def counts_what_is_moved(rank: int, world: int) -> None:
    engine = engine_of("replay")
    train(engine, rank, range(3))
    for _ in range(2):
        before = engine.stats()["bytes_sent"]["all_gather"]
        train(engine, rank, range(3, 4))
        moved = engine.stats()["bytes_sent"]["all_gather"] - before
        assert moved <= 2 * LAYERS * SIZE * 4, "only biases travel"


def counts_meetings(rank: int, world: int) -> list[int]:
    engine = engine_of("replay")
    train(engine, rank, range(4))
    counts = []
    for step in range(4, 7):
        before = engine.stats()["collectives"]["all_gather"]
        train(engine, rank, range(step, step + 1))
        counts.append(engine.stats()["collectives"]["all_gather"] - before)
    return counts


def test_small_parameters_are_gathered_once_a_step_and_together() -> None:
    for counts in run_ranks(2, counts_meetings):
        assert counts == [1, 1, 1], f"{LAYERS} biases, read in the forward"


def test_a_weight_that_is_read_in_place_does_not_travel() -> None:
    run_ranks(2, counts_what_is_moved)


def slow_updates(rank: int, world: int, mode: str) -> list[float]:
    """Each rank in turn is late with its backward, and late with its update."""
    engine = engine_of(mode, bias=False)  # gathers of biases would hold the ranks together
    losses = []
    for step in range(6):
        loss = engine(batch(10 * step, rank))
        if (step + 1) % world == rank:
            time.sleep(0.05)  # a race would show: the other rank is done with its forward long before
        engine.backward(loss)
        if step % world == rank:
            time.sleep(0.05)  # and begins the next while the weights of this one are not updated yet
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["compile", "replay"])
def test_nobody_reads_a_shard_before_its_owner_has_updated_it(mode: str) -> None:
    expected = unsharded(2, 6, 1, bias=False)
    for rank, losses in enumerate(run_ranks(2, slow_updates, mode)):
        assert losses == pytest.approx(expected[rank], rel=1e-5)


def between_steps(rank: int, world: int, mode: str) -> None:
    engine = engine_of(mode)
    train(engine, rank, range(4))
    whole = deepcompile.full_state_dict(engine.module)
    reference = Model()
    reference.load_state_dict(whole)
    x = batch(99, 0)

    def evaluates_as_the_reference() -> bool:
        before = engine.stats()["gathers_in_place"]
        with torch.no_grad():
            same = torch.allclose(engine(x), reference(x), rtol=1e-5)
        return same and engine.stats()["gathers_in_place"] == before  # who knows what an evaluation is followed by

    assert evaluates_as_the_reference()
    engine(batch(5, rank))  # a forward without a backward, then other weights
    other = {name: value * 0.5 for name, value in whole.items()}
    engine.module.load_state_dict(copy.deepcopy(other))
    reference.load_state_dict(other)
    assert evaluates_as_the_reference()
    sharding, weight = engine.sharding, engine.sharding.params[0]
    place = weight.param.data_ptr()
    torch.ops.dc.offload_parameter(weight.param, sharding.graph_id, weight.id)
    taken = deepcompile.shm.zeros(weight.param.numel()) if rank == 0 else None
    torch.ops.dc.reload_parameter(weight.param, sharding.graph_id, weight.id)
    assert evaluates_as_the_reference()
    if rank == 0:  # its shard is not where all ranks have mapped it
        assert taken is not None and weight.param.data_ptr() != place
    for _ in range(2):
        mine = engine(batch(7, rank))
        engine.backward(mine)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.step()
        assert torch.allclose(mine, reference(batch(7, rank)), rtol=1e-5)
    assert evaluates_as_the_reference()


@pytest.mark.parametrize("mode", ["compile", "replay"])
def test_weights_that_are_loaded_moved_or_evaluated_between_steps_are_read_as_they_are(mode: str) -> None:
    run_ranks(2, between_steps, mode)


def not_assumed(rank: int, world: int, config: dict) -> int:
    model = Model()
    engine = deepcompile.initialize(
        model, torch.optim.Adam(model.parameters()), {"zero_optimization": {"stage": 3}, "timeout": 30, **config}
    )
    train(engine, rank, range(4))
    return engine.stats()["gathers_in_place"]


def test_on_demand_in_debug_mode_in_other_dtypes_and_where_it_is_switched_off_weights_are_copied() -> None:
    bf16 = {"compile": MODES["compile"], "bf16": {"enabled": True}}
    for config in ({"compile": False}, {"compile": MODES["compile"], "debug": True}, bf16):
        assert run_ranks(2, not_assumed, config) == [0, 0]
    off = {"DEEPCOMPILE_READ_IN_PLACE": "off"}
    assert run_ranks(2, not_assumed, {"compile": MODES["compile"]}, environment=off) == [0, 0]
