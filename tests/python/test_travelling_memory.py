"""Where tensors that travel lie, and what is copied on their way: shards in the heap that the ranks share, gradients reduced
from the memory in which the backward left them.
"""

from __future__ import annotations

import os

import torch
from torch import fx, nn

import deepcompile
from deepcompile import dc
from deepcompile.compiler.segments import REDUCE, donate_gradients
from deepcompile.sharding.sharding import sharding_of
from harness import only_on_cpu, run_ranks
from models import Llama, seeded

pytestmark = only_on_cpu("shared memory of processes")


def engine_of(stage: int, compiles: object, **more: object) -> deepcompile.Engine:
    model = Llama()
    config = {"zero_optimization": {"stage": stage}, "timeout": 60, "compile": compiles, **more}
    return deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def train(engine: deepcompile.Engine, steps: int = 3) -> None:
    for step in range(steps):
        engine.backward(engine(Llama.batch(seeded(step))))
        engine.step()


def shards_are_shared(rank: int, world: int, expected: bool, folder: str) -> None:
    for more in ({}, {"bf16": {"enabled": True}}):
        engine = engine_of(3, False, **more)
        train(engine)
        shards = [sharded.param for sharded in engine.sharding.params]
        assert all(deepcompile.shm.is_shared(shard) == expected for shard in shards)
        assert not any(deepcompile.shm.is_shared(v) for s in engine.optimizer.state.values() for v in s.values())
    places = [shard.data_ptr() for shard in shards]
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.module.load_state_dict(deepcompile.full_state_dict(engine.module))
    with deepcompile.full_params(engine.module):
        pass
    train(engine, 1)
    assert places == [shard.data_ptr() for shard in shards]


def test_shards_lie_in_the_shared_heap_and_stay_there_through_checkpoints(tmp_path) -> None:
    run_ranks(2, shards_are_shared, True, str(tmp_path))


def test_shards_lie_in_ordinary_memory_where_the_process_group_carries_them(tmp_path) -> None:
    run_ranks(2, shards_are_shared, False, str(tmp_path), environment={"DEEPCOMPILE_COMMUNICATOR": "c10d"})


def take_the_heap_away() -> None:
    """What was allocated stays; the system gives no more."""
    for fd in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{fd}"
        if os.path.islink(link) and "tensors" in os.readlink(link):
            os.dup2(os.open("/dev/null", os.O_RDONLY), int(fd))


def heap_is_full(rank: int, world: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    runtime = dc.Runtime(None, {"timeout": 20})
    kept = runtime.empty([1000], torch.float32)
    if rank == 1:  # one rank alone: it stages, and so do the others
        take_the_heap_away()
    numbers = [runtime.empty([4 << 20], torch.float32).fill_(rank) for _ in range(2)]
    assert deepcompile.shm.is_shared(kept)
    assert [deepcompile.shm.is_shared(tensor) for tensor in numbers] == [rank == 0] * 2
    runtime.register_z3_param(0, [world * numbers[0].numel()], numbers[0], None)
    runtime.register_graph_z3(0, [0])
    runtime.start_forward()
    whole = torch.ops.dc.gather_shard(numbers[0], 0, [world * numbers[0].numel()])
    assert torch.equal(whole, torch.arange(world).repeat_interleave(numbers[0].numel()))
    runtime.cleanup()


def test_where_the_shared_heap_is_full_shards_go_to_ordinary_memory_which_is_said_once(tmp_path) -> None:
    run_ranks(2, heap_is_full, str(tmp_path))
    said = [(tmp_path / str(rank)).read_text().count("go to ordinary memory") for rank in range(2)]
    assert said == [0, 1]


def gradients_stay(rank: int, world: int, compiles: object, expected: bool, more: dict) -> None:
    engine = engine_of(3, compiles, **more)
    train(engine)
    stats = engine.stats()
    assert stats["gradients_reduced"] > 0
    assert stats["gradients_in_place"] == (stats["gradients_reduced"] if expected else 0)


def test_gradients_are_reduced_from_where_the_backward_left_them() -> None:
    for compiles in (False, {"backend": "inductor"}):
        run_ranks(2, gradients_stay, compiles, True, {})


def test_gradients_are_copied_where_something_must_be_done_to_them_first() -> None:
    run_ranks(2, gradients_stay, False, False, {"bf16": {"enabled": True}})  # cast
    run_ranks(3, gradients_stay, False, False, {})  # divided by three


def test_only_a_gradient_that_nothing_else_reads_is_given_away() -> None:
    graph = fx.Graph()
    x, shard = graph.placeholder("x"), graph.placeholder("shard")
    gradients = {
        "fresh": graph.call_function(torch.ops.aten.mm.default, (x, x)),
        "view": graph.call_function(
            torch.ops.aten.permute.default, (graph.call_function(torch.ops.aten.mm.default, (x, x)), [1, 0])
        ),
        "read again": graph.call_function(torch.ops.aten.mm.default, (x, x)),
        "input": x,
    }
    base = graph.call_function(torch.ops.aten.mm.default, (x, x))
    gradients["view of what is read"] = graph.call_function(torch.ops.aten.permute.default, (base, [1, 0]))
    reductions = {name: graph.call_function(REDUCE, (node, shard, 0)) for name, node in gradients.items()}
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (gradients["read again"], base)),))
    donate_gradients(graph)
    given = {name for name, node in reductions.items() if node.args[3:] == (True,)}
    assert given == {"fresh", "view"}


def changes_a_gradient(rank: int, world: int) -> str:
    model = nn.Linear(64, 64, bias=False)
    deepcompile.shard(model, {"timeout": 20})
    sharding = sharding_of(model)
    gradient = sharding.runtime.empty([64, 64], torch.float32).fill_(1)  # elsewhere it would be copied
    sharding.runtime.start_forward()
    weight = model.weight
    sharding.runtime.start_backward(True)
    weight.backward(gradient)
    gradient.mul_(2)
    try:
        torch.ops.dc.end_backward(sharding.graph_id)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_changed_before_it_is_reduced_is_an_error_that_names_it() -> None:
    for text in run_ranks(2, changes_a_gradient):
        assert "the gradient of parameter 'weight'" in text and "changed in place" in text
