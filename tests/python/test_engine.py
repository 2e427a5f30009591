"""The engine's loop: accumulation, mixed precision, skipped steps, and what misuse is told."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.engine.clipping import LateFlag
from harness import DEVICE, RankFailed, only_on_cpu, run_ranks, where_ranks_run
from models import MLP, Llama, Run, seeded, train_unsharded, train_with_engine


def config(stage: int = 3, **more) -> dict:
    return {"zero_optimization": {"stage": stage}, "timeout": 20, "compile": False, **more}


def engine_of(stage: int = 3, make=Llama, **more) -> deepcompile.Engine:
    torch.manual_seed(5)
    model = make()
    return deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), config(stage, **more))


def batch(seed: int = 0) -> torch.Tensor:
    return Llama.batch(seeded(seed))


def half_precision(rank: int, world: int, stage: int, kind: str) -> tuple[list[float], dict]:
    more = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
    run = Run("llama", {}, config(stage, **more.get(kind, {})), steps=10)
    losses, _, stats = train_with_engine(rank, world, run)
    return losses, stats


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_half_precision_tracks_fp32_with_master_weights_and_moves_half_the_bytes(stage: int, kind: str) -> None:
    expected, _ = train_unsharded(Run("llama", {}, {}, steps=10), 2)
    by_rank = run_ranks(2, half_precision, stage, kind)
    full = run_ranks(2, half_precision, stage, "fp32")
    for rank in range(2):
        losses, stats = by_rank[rank]
        assert losses == pytest.approx(expected[rank], rel=3e-2)
        assert losses[-1] < losses[0]
        sent, sent_full = (each["bytes_sent"]["all_gather"] for each in (stats, full[rank][1]))
        assert sent < 0.6 * sent_full


@where_ranks_run
def train_unsharded_in_bf16(run: Run, world: int) -> list[list[float]]:
    """The ranks' batches in sequence: computed in bf16 from fp32 weights, gradients averaged and applied in fp32."""
    master, computes = run.make(), run.make().bfloat16()
    optimizer = run.optimizer(master.parameters())
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(run.steps):
        with torch.no_grad():
            for cast, param in zip(computes.parameters(), master.parameters(), strict=True):
                cast.copy_(param)
                param.grad = torch.zeros_like(param)
        for rank in range(world):
            loss = computes(run.batch(rank, step, 0))
            losses[rank].append(loss.item())
            gradients = torch.autograd.grad(loss, list(computes.parameters()))
            for param, gradient in zip(master.parameters(), gradients, strict=True):
                param.grad += gradient.float() / world
        optimizer.step()
    return losses


def in_bf16(rank: int, world: int) -> list[list[float]]:
    # Not tied: there unsharded training adds the two gradients in bf16, and the engine in fp32.
    runs = [Run("llama", {"tied": False}, config(stage, bf16={"enabled": True})) for stage in (1, 2, 3)]
    return [train_with_engine(rank, world, run)[0] for run in runs]


@pytest.mark.parametrize("world", [2, 3])
def test_twenty_steps_in_bf16_track_unsharded_training_in_bf16(world: int) -> None:
    expected = train_unsharded_in_bf16(Run("llama", {"tied": False}), world)
    for rank, stages in enumerate(run_ranks(world, in_bf16)):
        for losses in stages:
            assert losses == pytest.approx(expected[rank], rel=1e-3)  # a quarter of the last bit of bf16


def one_copy(rank: int, world: int) -> None:
    engine = engine_of(make=lambda: Llama().bfloat16(), bf16={"enabled": True})
    shard = engine.module._modules["norm"]._parameters["weight"]
    assert shard.dtype == torch.float32 and engine.module.norm.weight.dtype == torch.bfloat16
    engine.backward(engine(batch(rank)))
    assert shard.grad.dtype == torch.float32
    assert deepcompile.full_state_dict(engine.module)["norm.weight"].dtype == torch.bfloat16


def test_the_fp32_shard_is_the_only_copy_and_gathers_cast_it() -> None:
    run_ranks(2, one_copy)


def inputs_are_cast(rank: int, world: int) -> None:
    engine = engine_of(make=lambda: nn.Linear(3, 2), bf16={"enabled": True})
    assert engine(torch.ones(1, 3)).dtype == torch.bfloat16


def test_floating_point_inputs_are_cast_to_the_dtype_of_the_model() -> None:
    run_ranks(1, inputs_are_cast)


def overflows(rank: int, world: int) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepcompile").addHandler(handler)
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2})
    before = deepcompile.full_state_dict(engine.module)
    for _ in range(2):
        loss = engine(batch(rank))
        engine.backward(loss * float("inf") if rank == 1 else loss)  # one rank overflows
        assert engine.step() is False
    after = deepcompile.full_state_dict(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.skipped_steps == 2 and engine.steps == 0 and engine.loss_scale.value == 2**8
    assert len(records) == 1 and "The step is skipped and the loss scale is now 512. Said once" in records[0]
    for _ in range(2):
        engine.backward(engine(batch(rank)))
        assert engine.step() is True
    assert engine.loss_scale.value == 2**9
    assert engine.steps == 2 and engine.skipped_steps == 2


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_is_said_once() -> None:
    run_ranks(2, overflows)


def not_a_number(rank: int, world: int, stage: int) -> None:
    engine = engine_of(stage)
    before = deepcompile.full_state_dict(engine.module)
    engine.backward(engine(batch(rank)) * (float("nan") if rank == 0 else 1.0))
    assert engine.step() is False
    after = deepcompile.full_state_dict(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)


@only_on_cpu("on a device the host does not wait to know: test_cuda.py")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_not_numbers_skip_the_step_in_fp32_too(stage: int) -> None:
    run_ranks(2, not_a_number, stage)


def skips_late(rank: int, world: int, folder: str, kind: str) -> None:
    """An update on which the device decides, and the host hears of it later, leaves what one leaves that the host skips."""

    def train(late: bool) -> tuple[deepcompile.Engine, list[list[float]], list[dict]]:
        torch.manual_seed(0)
        model = Llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        schedules = {
            "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            "one cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
            "in sequence": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
                    torch.optim.lr_scheduler.StepLR(optimizer, 1),
                ],
                [3],
            ),
        }
        config = {"zero_optimization": {"stage": 3}, "timeout": 30, "compile": False}
        engine = deepcompile.initialize(model, optimizer, config, lr_scheduler=schedules[kind]())
        engine._clipping._skipped = LateFlag(torch.device("cpu")) if late else None
        rates, saved = [], []
        for step in range(7):
            loss = engine(Llama.batch(seeded(10 * step + rank)))
            engine.backward(loss * float("nan") if step in (1, 4) and rank == 0 else loss)
            engine.step()
            if step in (1, 2):
                where = engine.save_checkpoint(f"{folder}/{late}")
                facts = torch.load(f"{where}/facts.pt", weights_only=False)["engine"]
                saved.append(
                    {key: facts[key] for key in ("steps", "skipped_steps", "schedule")} | {"where": where[-6:]}
                )
            if step not in (1, 4):  # there the host may not know it yet
                rates.append(engine.get_lr())
        return engine, rates, saved

    (first, rates, saved), (other, late_rates, late_saved) = train(False), train(True)
    assert late_rates == rates and late_saved == saved
    assert (other.steps, other.skipped_steps) == (first.steps, first.skipped_steps) == (5, 2)
    expected = deepcompile.full_state_dict(first.module)
    for name, value in deepcompile.full_state_dict(other.module).items():
        assert torch.equal(value, expected[name]), name


@only_on_cpu("there the device decides in every test")
@pytest.mark.parametrize("kind", ["exponential", "one cycle", "in sequence"])
def test_a_step_that_is_known_late_to_be_skipped_advances_no_schedule_and_is_in_no_checkpoint(
    tmp_path, kind: str
) -> None:
    run_ranks(2, skips_late, str(tmp_path), kind)


def collectives(rank: int, world: int, stage: int) -> list[int]:
    engine = engine_of(stage, gradient_accumulation_steps=3)
    found = []
    for micro in range(6):
        before = engine.stats()["collectives"]["reduce_scatter"]
        engine.backward(engine(batch(micro)))
        assert engine.is_gradient_accumulation_boundary() == (micro % 3 == 2)
        assert engine.step() is (micro % 3 == 2)
        found.append(engine.stats()["collectives"]["reduce_scatter"] - before)
    return found


def test_stage_one_reduces_at_the_accumulation_boundary_only() -> None:
    at_boundary = run_ranks(2, collectives, 1)[0]
    assert [count > 0 for count in at_boundary] == [False, False, True] * 2
    assert all(count > 0 for count in run_ranks(2, collectives, 2)[0])


def held(rank: int, world: int, stage: int) -> dict[str, int]:
    engine = engine_of(stage, make=lambda: Llama(layers=3, size=64))
    engine.backward(engine(batch(rank)))
    gradients = sum(p.grad.untyped_storage().nbytes() for p in engine.parameters())
    engine.step()
    shards = sum(p.untyped_storage().nbytes() for p in engine.parameters())
    return {
        "gradients": gradients,
        "shards": shards,
        "gathered": engine.stats()["gathered_bytes_live"],
        "idle": engine.stats()["buffer_bytes_idle"],
    }


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_and_gradients_of_a_rank_take_their_part_of_the_memory(world: int) -> None:
    model = Llama(layers=3, size=64)
    whole = sum(param.numel() * 4 for param in model.parameters())
    for found in run_ranks(world, held, 3):
        assert found["shards"] <= 1.05 * whole / world and found["gradients"] <= 1.05 * whole / world
        assert found["gathered"] == 0
        largest = max(param.numel() * 4 for param in model.parameters())
        assert found["idle"] <= (3 * largest if DEVICE == "cpu" else 16 << 20)


def evaluates(rank: int, world: int, stage: int) -> None:
    engine = engine_of(stage)
    losses = []
    for step in range(3):
        engine.eval()
        with torch.no_grad():
            losses.append(engine(batch(7)).item())
        engine.train()
        loss = engine(batch(step)) + engine(batch(step + 10))  # two forwards, one backward
        engine.backward(loss)
        engine.step()
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_between_steps_and_two_forwards_in_one_backward_work(stage: int) -> None:
    run_ranks(2, evaluates, stage)


def scheduled(rank: int, world: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = deepcompile.initialize(model, optimizer, config(), lr_scheduler=schedule)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_schedule_advances_with_the_steps() -> None:
    run_ranks(2, scheduled)


def misuse(rank: int, world: int) -> None:
    engine = engine_of()
    with pytest.raises(RuntimeError, match=r"engine.step was called without engine.backward\(loss\)"):
        engine.step()
    with pytest.raises(ValueError, match=r"takes a scalar loss, not of shape \[2\]"):
        engine.backward(torch.ones(2))
    with pytest.raises(ValueError, match="takes a scalar loss, not a float"):
        engine.backward(1.0)  # type: ignore[arg-type]
    with torch.no_grad():
        loss = engine(batch())
    with pytest.raises(RuntimeError, match="does not depend on any trainable parameter"):
        engine.backward(loss)
    loss = engine(batch())
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="backward was called twice without engine.step"):
        engine.backward(loss)
    engine.step()
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)

    model, other = nn.Linear(3, 3), nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"group 0 holds a parameter of shape \[4, 3\] that is not one of the model's"):
        deepcompile.initialize(model, torch.optim.SGD(other.parameters()), config())
    with pytest.raises(ValueError, match="belongs to another, already sharded model"):
        deepcompile.initialize(model, torch.optim.SGD(engine.parameters()), config())
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer or a function"):
        deepcompile.initialize(nn.Linear(3, 3), "AdamW", config())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Adafactor treats a parameter as a whole"):
        deepcompile.initialize(model, torch.optim.Adafactor(model.parameters()), config())
    with pytest.raises(ValueError, match="'zero_optimization.stage' was 3 and is 1 now"):
        deepcompile.initialize(engine.module, None, config(1))
    bare = deepcompile.initialize(nn.Linear(3, 3), None, config())
    bare.backward(bare(torch.ones(3)).sum())
    with pytest.raises(RuntimeError, match="there is no optimizer"):
        bare.step()


def test_misuse_is_told_what_was_wrong() -> None:
    run_ranks(1, misuse)


def optimizers(rank: int, world: int) -> None:
    from_config = deepcompile.initialize(
        nn.Linear(3, 3), config=config(optimizer={"type": "Adam", "params": {"lr": 0.5}})
    )
    assert type(from_config.optimizer) is torch.optim.Adam
    model = deepcompile.shard(nn.Linear(3, 3), config(2))
    made = deepcompile.initialize(model, lambda params: torch.optim.RMSprop(params, lr=0.1))
    assert type(made.optimizer) is torch.optim.RMSprop and made.config.stage == 2


def test_an_optimizer_may_come_from_a_function_or_the_configuration() -> None:
    run_ranks(1, optimizers)


def data_ends(rank: int, world: int) -> None:
    engine = engine_of(timeout=2.0)
    for step in range(4 if rank == 0 else 2):
        engine.backward(engine(batch(step)))
        engine.step()
    if rank == 1:
        import time

        time.sleep(8)  # alive, but with no more data


@only_on_cpu("on a device the host does not wait: test_cuda.py")
@pytest.mark.alone
def test_data_that_ends_earlier_on_one_rank_is_an_error_on_the_other_and_not_a_hang() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 raised:(.|\n)*gathering parameter 'embed.weight'"):
        run_ranks(2, data_ends, timeout=60)


def two_engines(rank: int, world: int) -> None:
    first, second = engine_of(3), engine_of(1, make=MLP)
    for step in range(2):
        x = MLP.batch(seeded(step))
        first.backward(first(batch(step)))
        second.backward(second(x))
        second.step()
        first.step()
    first.close()
    second.backward(second(x))
    second.step()
    assert second.steps == 3


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    run_ranks(2, two_engines)


class Uneven(nn.Module):
    """Little more than its uneven weight: a shard is padded, and its fp32 master copy longer than the whole in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().square().mean()


def trains_uneven(rank: int, world: int, kind: str, mode: str) -> list[float]:
    torch.manual_seed(1)
    model = Uneven()
    compiles = {"mode": mode, "backend": "aot_eager", "profile_steps": 1}
    more = {"compile": compiles, kind: {"enabled": True} | ({"initial_scale_power": 8} if kind == "fp16" else {})}
    engine = deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config(**more))
    losses = []
    for step in range(4):
        loss = engine(torch.randn(4, 7, generator=seeded(10 * step + rank)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.skipped_steps == 0
    return losses


@where_ranks_run
def uneven_unsharded() -> list[list[float]]:
    torch.manual_seed(1)
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[float]] = [[], []]
    for step in range(4):
        losses = [model(torch.randn(4, 7, generator=seeded(10 * step + rank))) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, loss in enumerate(losses):
            found[rank].append(loss.item())
    return found


@pytest.mark.parametrize("mode", ["compile", "replay"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_small_uneven_parameter_is_planned_in_half_precision(kind: str, mode: str) -> None:
    expected = uneven_unsharded()
    for rank, losses in enumerate(run_ranks(2, trains_uneven, kind, mode)):
        assert losses == pytest.approx(expected[rank], rel=3e-2)
