"""Parameters that are frozen or trained only after the model was sharded."""

from __future__ import annotations

import pytest
import torch

import deepcompile
from deepcompile.engine.engine_replay import ReplayProfile
from harness import RankFailed, run_ranks, where_ranks_run
from models import Llama, WithGraphBreak, seeded

#: What is frozen, by phase: the first block, then nothing, then the last norm.
PHASES: tuple[tuple[str, ...], ...] = (("blocks.0.",), (), ("norm.",))
STEPS = 3  # of a phase: compiled or warmed up; recorded; followed
REPLAYS = {"mode": "replay", "profile_steps": 1}


def freeze(model: torch.nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes) if prefixes else True)


def batch(rank: int, step: int) -> torch.Tensor:
    return Llama.batch(seeded(10 * step + rank))


def made(kind: type[Llama] = Llama) -> tuple[Llama, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = kind()
    freeze(model, PHASES[0])
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@where_ranks_run
def unsharded(world: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model, optimizer = made()
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(STEPS * len(PHASES)):
        freeze(model, PHASES[step // STEPS])
        for rank in range(world):
            loss = model(batch(rank, step))
            losses[rank].append(loss.item())
            (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def sharded(
    rank: int, world: int, stage: int, compiles: object, kind: type[Llama] = Llama
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = made(kind)
    config = {"zero_optimization": {"stage": stage}, "timeout": 60, "compile": compiles}
    engine = deepcompile.initialize(model, optimizer, config)
    losses = []
    for step in range(STEPS * len(PHASES)):
        freeze(model, PHASES[step // STEPS])
        loss = engine(batch(rank, step))
        losses.append(loss.item())
        engine.backward(loss)
        frozen = [name for name, param in model.named_parameters() if param.grad is None]
        assert frozen == [name for name, param in model.named_parameters() if not param.requires_grad]
        engine.step()
        # What was recorded before others were trained is not followed: each phase records anew.
        if isinstance(engine.profile, ReplayProfile):
            assert (engine.profile.graph is not None) == (step % STEPS > 0), engine.profile.why_not
    if kind is WithGraphBreak or compiles == REPLAYS:
        assert isinstance(engine.profile, ReplayProfile)
    elif compiles:
        assert engine.sharding.planner.training_step() is not None  # of what runs now
    return losses, {name: value.clone() for name, value in deepcompile.full_state_dict(model).items()}


@pytest.mark.parametrize(
    ("stage", "compiles", "kind"),
    [
        (1, False, Llama),
        (3, False, Llama),
        (3, {"backend": "aot_eager"}, Llama),
        (3, {"backend": "aot_eager", "profile_steps": 1}, WithGraphBreak),
        (3, REPLAYS, Llama),
    ],
)
def test_parameters_frozen_or_trained_after_sharding_train_as_unsharded(
    stage: int, compiles: object, kind: type[Llama]
) -> None:
    losses, state = unsharded(2)
    for rank, (found_losses, found_state) in enumerate(run_ranks(2, sharded, stage, compiles, kind)):
        assert found_losses == pytest.approx(losses[rank], rel=1e-5)
        for name, value in state.items():
            assert torch.allclose(found_state[name], value, rtol=1e-4, atol=1e-6), name


def abandons(rank: int, world: int, compiles: object) -> None:
    model, optimizer = made()
    engine = deepcompile.initialize(model, optimizer, {"timeout": 20, "compile": compiles})
    for step in range(4):  # the first ones warm up, record and follow, where that is done
        engine(batch(rank, step))  # nobody takes a backward of it
        freeze(model, PHASES[step % 2])
        engine.backward(engine(batch(rank, step)))
        assert [param.grad is not None for param in model.parameters()] == [p.requires_grad for p in model.parameters()]
        engine.step()


@pytest.mark.parametrize("compiles", [False, {"backend": "aot_eager"}, REPLAYS])
def test_a_forward_without_a_backward_hides_nothing_that_is_frozen_or_trained_after_it(compiles: object) -> None:
    run_ranks(2, abandons, compiles)


def plain_loop(rank: int, world: int) -> None:
    model, optimizer = made()
    deepcompile.shard(model, {"timeout": 20})
    model(batch(rank, 0)).backward()
    optimizer.zero_grad()
    freeze(model, ())
    with pytest.raises(RuntimeError, match=r"'blocks.0..*is frozen.*call deepcompile.update_trainable\(model\)"):
        model(batch(rank, 0)).backward()
    members = {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")}
    assert set(deepcompile.update_trainable(model)) == members
    assert deepcompile.update_trainable(model) == []
    model(batch(rank, 1)).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_the_plain_loop_is_told_how_to_train_what_was_frozen() -> None:
    run_ranks(2, plain_loop)


def alone(rank: int, world: int) -> None:
    model, optimizer = made()
    engine = deepcompile.initialize(model, optimizer, {"timeout": 2, "compile": False})
    for step in range(3):
        if rank == 1 and step == 2:
            freeze(model, ())
        engine.backward(engine(batch(rank, step)))
        engine.step()


@pytest.mark.alone
def test_a_rank_that_trains_other_parameters_alone_is_an_error_and_no_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised"):
        run_ranks(2, alone, timeout=90)
