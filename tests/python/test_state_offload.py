"""Optimizer states that live on the host: the numbers are those of states that stay, and the device holds no more than said.

On a CPU host and device are one memory; there states are copied to other memory all the same (``DEEPCOMPILE_OFFLOAD``), so
that the same moves run as on a device.
"""

from __future__ import annotations

import copy
import pathlib
import re
import threading
from typing import Any

import pytest
import torch

import deepcompile
from deepcompile.sharding import fused_adam, state_offload
from harness import STREAMS, only_on_cpu, run_ranks
from models import MODELS, Llama, Run, losses_with_engine

ALWAYS = {"DEEPCOMPILE_OFFLOAD": "always"}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}
HOST = {"offload_optimizer": {"device": "cpu"}}


def config(stage: int = 3, offload: bool = True, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **(HOST if offload else {})}
    return {"zero_optimization": zero, "timeout": 100, "compile": False, **more}


def engine_of(run: Run, optimizer: str = "adamw") -> deepcompile.Engine:
    state_offload._LEAST_PIECE = 1  # so that a small model has pieces
    model = run.make()
    engine = deepcompile.initialize(model, OPTIMIZERS[optimizer], run.config)
    if engine.offload is not None:
        _watch_updates(engine)
    return engine


def _watch_updates(engine: deepcompile.Engine) -> None:
    """On a CPU an update of states that are on the host is right; on a device it would be an error. So it is one here."""
    inner, members = fused_adam.step, engine.sharding.by_parameter()

    def step(optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p in members and p.grad is not None]
        away = set(engine.sharding.runtime.states.away if optimizer is engine.optimizer else ())
        assert not [members[param].name for param in params if members[param].id in away]
        inner(optimizer)

    fused_adam.step = step


def states_of(engine: deepcompile.Engine) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    return [
        value
        for sharded in engine.sharding.params
        for value in state_offload.as_large(sharded.param, engine.optimizer.state[sharded.param]).values()
    ]


def bytes_of_states(engine: deepcompile.Engine) -> int:
    return sum(state.nbytes for state in states_of(engine))


def trained(rank: int, run: Run, optimizer: str = "adamw") -> tuple[list[float], dict[str, torch.Tensor], Any]:
    engine = engine_of(run, optimizer)
    losses = losses_with_engine(engine, rank, run)
    return losses, deepcompile.full_state_dict(engine.module), engine


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def with_and_without(rank: int, world: int, optimizer: str, stage: int) -> None:
    losses, parameters, _ = trained(rank, Run("llama", {}, config(stage, offload=False), steps=4), optimizer)
    found, offloaded, engine = trained(rank, Run("llama", {}, config(stage), steps=4), optimizer)
    assert found == losses
    assert_same(offloaded, parameters)
    assert len(engine.offload.pieces) > 3
    every, stats = bytes_of_states(engine), engine.stats()
    assert engine.sharding.runtime.states.bytes_away == every > 0
    # Made on the device by the first update (Adagrad makes its states at once, which leave before it), and there for every
    # other.
    early = optimizer == "adagrad"
    assert stats["bytes_offloaded"] == (4 + early) * every
    assert stats["bytes_reloaded"] == (3 + early) * every


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_states_on_the_host_train_to_the_same_bits(optimizer: str, stream: str) -> None:
    run_ranks(2, with_and_without, optimizer, 3, environment=ALWAYS | {"DEEPCOMPILE_CPU_STREAM": stream})


@pytest.mark.parametrize("stage", [1, 2])
def test_they_do_under_every_stage_and_on_three_ranks(stage: int) -> None:
    run_ranks(3, with_and_without, "adamw", stage, environment=ALWAYS)


def test_they_do_on_one_rank() -> None:
    run_ranks(1, with_and_without, "fused adamw", 3, environment=ALWAYS)


def holds_three_pieces(rank: int, world: int) -> None:
    engine = engine_of(Run("llama", {}, config()), "sgd")
    engine.backward(engine(Llama.batch(torch.Generator(torch.get_default_device()).manual_seed(rank))))
    engine.step()
    engine.backward(engine(Llama.batch(torch.Generator(torch.get_default_device()).manual_seed(rank))))
    states, every = engine.sharding.runtime.states, bytes_of_states(engine)
    sizes = [sum(s.param.nbytes for s in piece) for piece in engine.offload.pieces]
    here: list[int] = []
    inner = engine.optimizer.step.__wrapped__

    def step(self: Any, closure: Any = None) -> None:
        here.append(every - states.bytes_away)  # leaving and returning counted in
        inner(self, closure)

    type(engine.optimizer).step = step
    engine.step()
    assert len(here) == len(sizes) > 3
    assert here == [sum(sizes[max(0, i - 1) : i + 2]) for i in range(len(sizes))]


def test_while_a_piece_is_updated_only_its_neighbours_are_on_the_device_with_it() -> None:
    run_ranks(2, holds_three_pieces, environment=ALWAYS)


def whole_loop(rank: int, world: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}  # no update is skipped but the one that is meant to be
    more = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "fp16": fp16}
    results = []
    for offload in (False, True):
        engine = engine_of(Run("llama", {}, config(offload=offload, **more)))
        losses = []
        for step in range(6):
            loss = engine(Llama.batch(torch.Generator(torch.get_default_device()).manual_seed(step + 10 * rank)))
            losses.append(loss.item())
            engine.backward(loss * float("inf") if step == 3 and rank == 1 else loss)  # the second update is skipped
            engine.step()
        assert engine.skipped_steps == 1, (offload, engine.skipped_steps, losses)
        results.append((losses, deepcompile.full_state_dict(engine.module)))
        if offload:
            assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine)
            assert engine.stats()["bytes_reloaded"] == bytes_of_states(engine)  # not for the update that was skipped
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_accumulation_clipping_and_skipped_updates_are_as_without() -> None:
    run_ranks(2, whole_loop, environment=ALWAYS)


def goes_on(rank: int, world: int, folder: str, saves: bool, loads: bool) -> None:
    run = Run("llama", {}, config(offload=False), steps=6)
    expected, parameters, _ = trained(rank, run)
    first = engine_of(Run("llama", {}, config(offload=saves)))
    losses = losses_with_engine(first, rank, Run("llama", {}, {}, steps=3))
    first.save_checkpoint(folder)
    second = engine_of(Run("llama", {}, config(offload=loads)))
    second.load_checkpoint(folder)
    for step in range(3, 6):
        loss = second(run.batch(rank, step, 0))
        losses.append(loss.item())
        second.backward(loss)
        second.step()
    assert losses == expected
    assert_same(deepcompile.full_state_dict(second.module), parameters)


@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_checkpoints_hold_states_wherever_they_are(tmp_path: pathlib.Path, saves: bool, loads: bool) -> None:
    run_ranks(2, goes_on, str(tmp_path), saves, loads, environment=ALWAYS)


def state_dicts(rank: int, world: int) -> None:
    run = Run("llama", {}, config(offload=False), steps=3)
    _, _, without = trained(rank, run)
    _, _, engine = trained(rank, Run("llama", {}, config(), steps=3))
    mine, other = engine.optimizer.state_dict(), without.optimizer.state_dict()
    for key, state in other["state"].items():
        for slot, value in state.items():
            assert torch.equal(mine["state"][key][slot].cpu(), value.cpu())
    engine.optimizer.load_state_dict(copy.deepcopy(other))
    continued = [losses_with_engine(each, rank, Run("llama", {}, {}, steps=2)) for each in (engine, without)]
    assert continued[0] == continued[1]
    assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine)


def test_the_optimizers_state_dict_has_the_states_and_takes_others() -> None:
    run_ranks(2, state_dicts, environment=ALWAYS)


def watched(rank: int, world: int) -> None:
    run = Run("llama", {}, config(), steps=3)
    engine = engine_of(run)
    calls: list[int] = []
    engine.optimizer.register_step_post_hook(
        lambda optimizer, *_: calls.append(sum(len(group["params"]) for group in optimizer.param_groups))
    )
    losses = losses_with_engine(engine, rank, run)
    assert calls == [len(list(engine.module.parameters()))] * 3
    assert losses == trained(rank, Run("llama", {}, config(offload=False), steps=3))[0]
    assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine)


def test_who_looks_at_the_optimizers_steps_sees_one_with_all_parameters() -> None:
    run_ranks(2, watched, environment=ALWAYS)


def interrupted(rank: int, world: int, folder: str) -> None:
    """Between a forward that nobody takes a backward of and the update states are loaded and parameters thawed."""
    results = []
    for offload in (False, True):
        run = Run("llama", {}, config(offload=offload), steps=2)
        engine = engine_of(run)
        losses = losses_with_engine(engine, rank, run)
        engine.save_checkpoint(folder, tag=f"offload-{offload}")
        shards = [sharded.param for sharded in engine.sharding.params]
        for shard in shards[::2]:
            shard.requires_grad_(False)
        losses += losses_with_engine(engine, rank, run)
        engine(run.batch(rank, 5, 5))
        for shard in shards[::2]:
            shard.requires_grad_(True)
        losses += losses_with_engine(engine, rank, run)
        engine(run.batch(rank, 5, 5))
        engine.load_checkpoint(folder, tag=f"offload-{offload}")
        losses += losses_with_engine(engine, rank, run)
        results.append((losses, deepcompile.full_state_dict(engine.module)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_states_that_were_loaded_or_thawed_within_a_step_are_on_the_device_for_their_update(
    tmp_path: pathlib.Path,
) -> None:
    run_ranks(2, interrupted, str(tmp_path), environment=ALWAYS)


def other_optimizers(rank: int, world: int) -> None:
    run = Run("llama", {}, config(), steps=2)
    engine = engine_of(run)
    losses_with_engine(engine, rank, run)
    before = deepcompile.full_state_dict(engine.module)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.0, momentum=0.9)
    losses_with_engine(engine, rank, run)
    assert_same(deepcompile.full_state_dict(engine.module), before)
    assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine) > 0
    with pytest.raises(RuntimeError, match="another engine of this model keeps its optimizer's states on the host"):
        deepcompile.initialize(engine.module, OPTIMIZERS["sgd"], config())
    second = deepcompile.initialize(engine.module, OPTIMIZERS["sgd"], config(offload=False))
    losses_with_engine(second, rank, run)
    assert second.stats()["bytes_offloaded"] == engine.stats()["bytes_offloaded"]
    assert not torch.equal(deepcompile.full_state_dict(engine.module)["norm.weight"], before["norm.weight"])


def test_the_optimizer_that_the_engine_has_is_the_one_that_is_stepped() -> None:
    run_ranks(2, other_optimizers, environment=ALWAYS)


def sharded_before(rank: int, world: int) -> None:
    run = llama(planned_config(None) | {"zero_optimization": {"stage": 3, **HOST}})
    state_offload._LEAST_PIECE = 1
    model = deepcompile.shard(run.make(), planned_config(None, offload=False))
    engine = deepcompile.initialize(model, OPTIMIZERS["sgd"], run.config)
    losses_with_engine(engine, rank, run)
    assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine) > 0


def test_what_the_engine_is_told_counts_where_the_model_was_sharded_before() -> None:
    run_ranks(2, sharded_before, environment=ALWAYS)


def one_rank_watches(rank: int, world: int) -> None:
    run = llama(planned_config("least"))
    losses, _, _ = trained(rank, llama(planned_config(None, offload=False)))
    engine = engine_of(run)
    if rank == 0:
        engine.optimizer.register_step_post_hook(lambda *_: None)
    assert losses_with_engine(engine, rank, run) == losses


def test_ranks_plan_alike_though_one_has_hooks_on_its_optimizer() -> None:
    run_ranks(2, one_rank_watches, environment=ALWAYS)


def asked_by_a_thread(rank: int, world: int) -> None:
    states = engine_of(Run("llama", {}, config())).sharding.runtime.states
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            states.bytes_away, states.away  # noqa: B018

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(5000):
        states.set(0, [torch.ones(4)], "w")  # the runtime has the last reference to the one before, which is Python's
    ended.set()
    thread.join()


def test_a_thread_that_asks_where_states_are_does_not_stop_the_one_that_changes_them() -> None:
    run_ranks(1, asked_by_a_thread, timeout=60, environment=ALWAYS)


def frozen_later(rank: int, world: int) -> None:
    results = []
    for offload in (False, True):
        run = Run("llama", {}, config(offload=offload), steps=2)
        engine = engine_of(run)
        losses = losses_with_engine(engine, rank, run)
        shards = [sharded.param for sharded in engine.sharding.params]
        for freeze in (True, False):
            for shard in shards[::2]:
                shard.requires_grad_(not freeze)
            losses += losses_with_engine(engine, rank, run)
        results.append((losses, deepcompile.full_state_dict(engine.module)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_parameters_are_frozen_and_thawed_as_without() -> None:
    run_ranks(2, frozen_later, environment=ALWAYS)


def nothing_to_move(rank: int, world: int) -> tuple[str, int]:
    _, _, engine = trained(rank, Run("llama", {}, config(), steps=2))
    return str(engine.explain()), engine.stats()["bytes_offloaded"]


@only_on_cpu("where the device is not the host, states move")
def test_on_a_cpu_nothing_is_copied_and_the_explanation_says_why() -> None:
    words, moved = run_ranks(2, nothing_to_move)[0]
    assert moved == 0
    assert "optimizer states" in words and "in host memory, which is where the model is" in words


# -- as planned ---------------------------------------------------------------------------------------------------------

INLINE = ALWAYS | {"DEEPCOMPILE_CPU_STREAM": "inline"}


def planned_config(
    budget: int | str | None, backend: str = "aot_eager", offload: bool = True, **more: Any
) -> dict[str, Any]:
    compiles = {"backend": backend, "profile_steps": 0, "offload_opt_states": offload}
    return {"zero_optimization": {"stage": 3}, "timeout": 100, "compile": compiles, "memory_budget": budget, **more}


def llama(config: dict[str, Any], steps: int = 4) -> Run:
    return Run("llama", {"layers": 2, "size": 64, "tied": False}, config, steps=steps)


def away_at_the_turn(engine: deepcompile.Engine) -> set[str]:
    """Whose states are on the host between forward and backward, as the plan has it. What it has behind the forward's last
    read is done when the backward begins.
    """
    step = engine.sharding.planner.training_step()
    assert step is not None and step.plan is not None and step.plan.states is not None
    names = {sharded.id: sharded.name for sharded in engine.sharding.params}
    away = {names[i] for i in step.plan.states.on_host}
    leaving: dict[Any, list[str]] = {}
    at_the_last_read: set[str] = set()
    graph = step.plan.micro.graph
    for kind, node, operation, items in step.plan.micro.instructions:
        states = [graph.params[index] for item, index in items if item == "state"]
        if kind == "compute" and graph.nodes[node].startswith("b"):
            break
        if kind == "compute":
            at_the_last_read = set(away)
        if kind == "offload":
            leaving[operation] = states
        elif kind == "wait":
            away |= set(leaving.pop(operation, []))
        elif kind == "reload":
            away -= set(states)
    return at_the_last_read


def follows_the_plan(rank: int, world: int, backend: str, budget: int | str) -> int:
    losses, parameters, _ = trained(rank, llama(planned_config(None, offload=False)))
    run = llama(planned_config(budget, backend))
    engine = engine_of(run)
    found = []
    for step in range(run.steps):
        loss = engine(run.batch(rank, step, 0))
        found.append(loss.item())
        if step > 0:
            away = away_at_the_turn(engine)
            expected = sum(2 * s.param.nbytes for s in engine.sharding.params if s.name in away)
            away_now = engine.sharding.runtime.states.bytes_away
            assert away_now == expected > 0, (step, away_now, expected, sorted(away), str(engine.explain()))
        engine.backward(loss)
        engine.step()
    if backend == "aot_eager":
        assert found == losses
        assert_same(deepcompile.full_state_dict(engine.module), parameters)
    else:  # what is fused is rounded otherwise
        assert found == pytest.approx(losses, rel=1e-4)
    step = engine.sharding.planner.training_step()
    kinds = {item for _, _, _, items in step.plan.planned.instructions for item, _ in items}
    assert kinds == {"param", "state"}  # neither activations nor shards
    assert "parameters move, as planned" in str(engine.explain())
    return step.plan.planned.peak_bytes


def test_a_plan_moves_states_where_the_budget_has_no_room_for_them_and_they_are_where_it_says() -> None:
    least = run_ranks(2, follows_the_plan, "aot_eager", "least", environment=INLINE)[0]
    # On a CPU gradients keep their memory from step to step unless the least is wanted.
    assert run_ranks(2, follows_the_plan, "aot_eager", least * 3 // 2, environment=INLINE)[0] > least


def test_compiled_code_moves_them_in_its_forward_and_its_backward() -> None:
    run_ranks(2, follows_the_plan, "inductor", "least", environment=ALWAYS)


def least_without(rank: int, world: int, offload: bool) -> int:
    _, _, engine = trained(rank, llama(planned_config("least", offload=offload), steps=1))
    return engine.sharding.planner.training_step().plan.planned.peak_bytes


def test_with_states_on_the_host_a_step_fits_less_memory() -> None:
    without, moved = (run_ranks(2, least_without, offload, environment=INLINE)[0] for offload in (False, True))
    assert moved < 0.8 * without


def travels_once_a_step(rank: int, world: int) -> None:
    more = {"gradient_accumulation_steps": 3}
    losses, parameters, _ = trained(rank, llama(planned_config(None, offload=False, **more)))
    run = llama(planned_config("least", **more))
    found, offloaded, engine = trained(rank, run)
    assert found == losses
    assert_same(offloaded, parameters)
    moving = engine.sharding.planner.training_step().plan.states.moving
    size = sum(2 * s.param.nbytes for s in engine.sharding.params if s.id in moving)
    assert engine.stats()["bytes_reloaded"] == (run.steps - 1) * size > 0  # the first update makes them


def test_within_an_accumulation_states_leave_once_and_return_once() -> None:
    run_ranks(2, travels_once_a_step, environment=INLINE)


def of_one_state(rank: int, world: int) -> None:
    run = llama(planned_config("least"))
    run.config["compile"]["profile_steps"] = 1
    engine = engine_of(run, "sgd")
    planned = []
    for step in range(run.steps):
        engine.backward(engine(run.batch(rank, step, 0)))
        engine.step()
        planned.append(engine.sharding.planner.training_step().plan.planned.graph.text)
    sharded = engine.sharding.params[0]
    assert planned_state_bytes(planned[0], sharded.name) == 2 * sharded.param.nbytes
    assert planned_state_bytes(planned[-1], sharded.name) == sharded.param.nbytes  # momentum alone


def planned_state_bytes(text: str, param: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(f"param {param} "))
    (number, unit), *_ = re.findall(r" state=(\d+)(\w*)", line)
    return int(number) * {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def test_once_there_are_states_they_are_planned_as_large_as_they_are() -> None:
    run_ranks(2, of_one_state, environment=INLINE)


def stays(rank: int, world: int) -> tuple[int, str]:
    _, _, engine = trained(rank, llama(planned_config(None)))
    return engine.stats()["bytes_offloaded"], str(engine.explain())


def test_where_there_is_room_no_state_moves() -> None:
    moved, words = run_ranks(2, stays, environment=ALWAYS)[0]
    assert moved == 0
    assert "there is room for those of all 17 parameters" in words


class Cut(Llama):
    """With a graph break behind each layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.register_forward_hook(lambda *_: torch._dynamo.graph_break())


class GathersInItsForwardAlone(torch.nn.Module):
    """Its backward reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 64)
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4096)) for _ in range(4)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.table(batch).sum() + sum(scale.sum() for scale in self.scales)


def moves_in_a_backward_without_gathers(rank: int, world: int) -> None:
    from deepcompile.planning import step_planner

    inner = step_planner.graph_schedule
    lengths: list[int] = []

    def with_moves(graph_plan: Any, segments: Any, phase: str) -> Any:
        (begin, keep, gathers, _), *reads = inner(graph_plan, segments, phase)
        moves = ((0, 1), (0, 1), (0, 1)) if phase == "backward" else ((), (), ())
        lengths.append(len(reads))
        return [(begin, keep, gathers, moves), *reads]

    step_planner.graph_schedule = with_moves
    torch.manual_seed(3)
    engine = deepcompile.initialize(GathersInItsForwardAlone(), OPTIMIZERS["adamw"], planned_config(None))
    for _ in range(2):
        before = engine.stats()["bytes_offloaded"]
        engine.backward(engine(torch.arange(64)))
        moved = engine.stats()["bytes_offloaded"] - before
        engine.step()
    assert moved > 0
    assert 0 in lengths


def test_a_backward_that_gathers_nothing_moves_states_all_the_same() -> None:
    run_ranks(2, moves_in_a_backward_without_gathers, environment=ALWAYS)


def evaluates(rank: int, world: int, budget: int) -> None:
    run = llama(planned_config(budget))
    engine = engine_of(run)
    losses_with_engine(engine, rank, run)
    with torch.no_grad():
        engine(run.batch(rank, 0, 0))
    steps = engine.sharding.planner.steps.values()
    assert [step.why_not for step in steps if not step.trains] == [""], [(s.name, s.why_not) for s in steps]
    assert engine.sharding.planner.training_step().plan.states.on_host


@only_on_cpu("the budget leaves room for the evaluation of a CPU's plan: an evaluation moves no states")
def test_an_evaluation_is_planned_beside_the_states_that_are_there_between_updates() -> None:
    run_ranks(2, evaluates, 720_000, environment=INLINE)


def without_a_plan(rank: int, world: int, kind: str) -> None:
    config_ = planned_config(1000 if kind == "no room" else None)
    if kind == "replay":
        config_["compile"] = {"mode": "replay", "profile_steps": 1, "offload_opt_states": True}
    if kind == "several graphs":
        MODELS["llama"] = Cut
    losses, parameters, _ = trained(
        rank, llama({**config_, "compile": {**config_["compile"], "offload_opt_states": False}})
    )
    found, offloaded, engine = trained(rank, llama(config_))
    assert engine.sharding.planner.training_step() is None or kind == "no room"
    assert found == losses
    assert_same(offloaded, parameters)
    assert engine.sharding.runtime.states.bytes_away == bytes_of_states(engine) > 0


@pytest.mark.parametrize("kind", ["no room", "replay", "several graphs"])
def test_where_nobody_plans_them_all_move(kind: str) -> None:
    run_ranks(2, without_a_plan, kind, environment=ALWAYS)


def abandons(rank: int, world: int) -> None:
    results = []
    for offload in (False, True):
        run = llama(planned_config("least", offload=offload))
        engine = engine_of(run)
        losses = []
        for step in range(run.steps):
            engine(run.batch(rank, step, 7))  # a forward that nobody takes a backward of
            with torch.no_grad():
                losses.append(engine(run.batch(rank, step, 5)).item())
            loss = engine(run.batch(rank, step, 0))
            losses.append(loss.item())
            engine.backward(loss)
            if offload:  # bring everything back at a time of its own
                assert engine.optimizer is not None
                engine.optimizer.state_dict()
            engine.step()
        results.append((losses, deepcompile.full_state_dict(engine.module)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_a_loop_that_does_not_follow_the_plan_has_the_same_numbers() -> None:
    run_ranks(2, abandons, environment=INLINE)
