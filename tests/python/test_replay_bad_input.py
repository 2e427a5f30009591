"""What record, compile and execute say to what they cannot use."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import deepcompile
from deepcompile.sharding.sharding import sharding_of
from harness import run_ranks
from models import MLP, Llama, seeded
from test_replay import compiled, iterate, plain


def bad_recordings(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="no model is sharded in this process"), deepcompile.record():
        pass
    with pytest.raises(RuntimeError, match="nothing was recorded; run an iteration inside"):
        deepcompile.get_recorded_ops()
    model, optimizer = plain()
    with (
        pytest.raises(RuntimeError, match="no sharded parameter was read inside. Put the forward"),
        deepcompile.record(),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"half an iteration was recorded: \d+ reads and no end"),
        deepcompile.record(),
    ):
        loss = model(Llama.batch(seeded(0)))
    with pytest.raises(RuntimeError, match="whose forward ran before the block"), deepcompile.record():
        loss.backward()
    with pytest.raises(RuntimeError, match="gathered after the last backward"), deepcompile.record():
        iterate(model, optimizer)
        with torch.no_grad():
            model(Llama.batch(seeded(0)))
    with pytest.raises(RuntimeError, match="recordings cannot be nested"), deepcompile.record():
        iterate(model, optimizer)
        with deepcompile.record():
            pass
    with pytest.raises(ValueError, match="is not sharded"), deepcompile.record(nn.Linear(2, 2)):
        pass
    other, other_optimizer = plain()
    with pytest.raises(RuntimeError, match=r"Llama and Llama ran inside; name one"), deepcompile.record():
        iterate(model, optimizer)
        iterate(other, other_optimizer)
    with deepcompile.record(other):
        iterate(model, optimizer)
        iterate(other, other_optimizer)
    with pytest.raises(RuntimeError, match="2 sharded models fit; name the one"):
        deepcompile.compile()
    deepcompile.compile(model=other)
    sharding_of(other).close()
    fast = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="compiled code communicated"), deepcompile.record():
        fast(Llama.batch(seeded(0))).backward()


def test_recordings_of_nothing_of_half_an_iteration_or_of_compiled_code_say_what_to_do() -> None:
    run_ranks(2, bad_recordings)


def bad_compiles(rank: int, world: int, folder: str) -> None:
    model, optimizer = plain()
    graph = compiled(model, optimizer)
    ops = deepcompile.get_recorded_ops()
    for ahead, kind in ((-1, ValueError), ("all", TypeError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="prefetch_ahead"):
            deepcompile.compile(ops, 3, ahead)
    with pytest.raises(ValueError, match="zero_stage is 1, and the ops were recorded under stage 3"):
        deepcompile.compile(ops, zero_stage=1)
    with pytest.raises(TypeError, match="must come from deepcompile.get_recorded_ops"):
        deepcompile.compile([("gather", "w")])
    with pytest.raises(ValueError, match="memory_budget is 0"):
        deepcompile.compile(ops, memory_budget=0)
    file = pathlib.Path(folder, "graph.txt")
    graph.save(file)
    ops.save(f"{folder}/ops{rank}.txt")
    sharding_of(model).close()
    with pytest.raises(RuntimeError, match="was closed; shard the model and record it again"), graph.execute():
        pass
    other, _ = plain(make=MLP)
    for attempt in (lambda: deepcompile.compile(ops), lambda: deepcompile.CompiledGraph.load(file)):
        with pytest.raises(
            ValueError, match=r"recorded of another model than MLP .* Record an iteration of this model"
        ):
            attempt()
    sharding_of(other).close()
    staged, _ = plain(stage=2)
    with pytest.raises(ValueError, match="the ZeRO stage was 3 and is 2"):
        deepcompile.compile(ops)
    sharding_of(staged).close()
    _wider = plain(make=lambda: Llama(size=32))
    with pytest.raises(ValueError, match=r"'shape' of parameter 'embed.weight' was \(31, 16\) and is \(31, 32\)"):
        deepcompile.CompiledGraph.load(file)
    with pytest.raises(ValueError, match="not a file that CompiledGraph.save wrote"):
        deepcompile.CompiledGraph.load(f"{folder}/ops{rank}.txt")
    with pytest.raises(ValueError, match="not a file of recorded ops"):
        deepcompile.RecordedOps.load(file)
    text = pathlib.Path(folder, f"ops{rank}.txt").read_text()
    for broken in (text.replace("\nwait ", "\nwhat ", 1), text.replace("float32 forward", "float32", 1)):
        with pytest.raises(ValueError, match=r"line \d+: .* is not a line of recorded ops"):
            deepcompile.RecordedOps.parse(broken)


def test_ops_of_another_model_or_stage_and_bad_options_are_refused(tmp_path) -> None:
    run_ranks(2, bad_compiles, str(tmp_path))


def bad_executions(rank: int, world: int) -> None:
    model, optimizer = plain()
    graph = compiled(model, optimizer)
    second = deepcompile.compile()
    with graph.execute():
        for other in (graph, second):
            with pytest.raises(RuntimeError, match=r"execute\(\) cannot be nested or entered twice"), other.execute():
                pass
        iterate(model, optimizer)
    model.norm._parameters["weight"].requires_grad_(False)
    with (
        pytest.raises(RuntimeError, match="'trainable' of parameter 'norm.weight' was True and is False"),
        graph.execute(),
    ):
        pass
    model.norm._parameters["weight"].requires_grad_(True)
    kept = model.norm._parameters["weight"]
    model.norm._parameters["weight"] = nn.Parameter(torch.ones(16))
    with pytest.raises(RuntimeError, match="parameter 'norm.weight' was replaced"), graph.execute():
        pass
    model.norm._parameters["weight"] = kept
    with graph.execute():
        iterate(model, optimizer)
    assert graph.divergences == 0


def test_execute_nested_entered_twice_or_with_changed_parameters_is_refused() -> None:
    run_ranks(2, bad_executions)


def different_reads(rank: int, world: int) -> None:
    model, optimizer = plain(2, make=MLP, zero={"param_persistence_threshold": 10**6})
    with torch.no_grad():
        model(MLP.batch(seeded(0)))  # all parameters are gathered and stay
    with deepcompile.record():
        if rank == 1:
            model.layers[0].bias  # noqa: B018 - read alone, before the others
        model(MLP.batch(seeded(0))).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="the ranks recorded different reads: read 0 of pass 0 was"):
        deepcompile.compile()


def test_ranks_that_recorded_different_reads_are_told_which() -> None:
    run_ranks(2, different_reads)
