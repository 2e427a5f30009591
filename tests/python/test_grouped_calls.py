"""One rank that gathers all the same: few calls in place of many, the numbers of unsharded training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx

import deepcompile
from deepcompile.compiler.grouped_calls import GATHER_ALL, GRADIENTS_A_CALL, REDUCE_ALL, group_calls
from deepcompile.compiler.segments import GATHER, REDUCE
from harness import DEVICE, run_ranks
from models import seeded
from test_shards_in_place import LAYERS, MODES, Model, train, unsharded

PARAMETERS = 2 * LAYERS


def graph_with(gathers: int, cast: int) -> fx.GraphModule:
    """Gathers of as many parameters, each read by a sum and reduced; the one numbered ``cast`` is read in 16 bits."""
    graph = fx.Graph()
    shards = [graph.placeholder(f"primals_{number}") for number in range(gathers)]
    for number, shard in enumerate(shards):
        shard.meta["val"] = torch.empty(6, device="meta")
        dtype = torch.bfloat16 if number == cast else torch.float32
        gathered = graph.call_function(GATHER, (shard, 0, [2, 3], dtype))
        gathered.meta["val"] = torch.empty(2, 3, dtype=dtype, device="meta")
        gradient = graph.call_function(torch.ops.aten.mul.Tensor, (gathered, 2))
        gradient.meta["val"] = gathered.meta["val"]
        graph.call_function(REDUCE, (gradient, shard, 0, number % 2 == 0)).meta["val"] = torch.empty(0, device="meta")
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_has_one_call_for_its_gathers_and_one_for_every_sixteen_gradients() -> None:
    module = graph_with(GRADIENTS_A_CALL + 4, cast=3)
    group_calls(module.graph)
    nodes = list(module.graph.nodes)
    (together,) = [node for node in nodes if node.target is GATHER_ALL]
    (alone,) = [node for node in nodes if node.target is GATHER]
    assert alone.args[3] == torch.bfloat16, "what casts makes a copy, where it is used"
    shards, graph_id, shapes, dims = together.args
    assert (len(shards), graph_id, shapes, dims) == (19, 0, [2, 3] * 19, [2] * 19)
    assert not [node for node in nodes if node.target is REDUCE]
    first, second = (node for node in nodes if node.target is REDUCE_ALL)
    assert [len(arguments) for arguments in first.args[:2]] == [16, 16] and first.args[3] == [1, 0] * 8
    assert [len(arguments) for arguments in second.args[:2]] == [4, 4]
    order = {node: place for place, node in enumerate(nodes)}
    assert all(order[gradient] < order[first] for gradient in first.args[0])
    assert order[first] < order[second.args[0][1]], "the first sixteen do not wait for the rest"


def test_a_gradient_is_handed_over_as_it_was_made_and_not_as_a_view_of_it() -> None:
    module = graph_with(2, cast=-1)
    first, second = [node for node in module.graph.nodes if node.target is REDUCE]
    made, transposed = first.args[0], second.args[0]
    aten = torch.ops.aten
    with module.graph.inserting_before(first):
        flat = module.graph.call_function(aten.view.default, (made, [6]))
        first.args = (module.graph.call_function(aten.unsqueeze.default, (flat, 0)), *first.args[1:])
    with module.graph.inserting_before(second):
        transposed = module.graph.call_function(aten.t.default, (transposed,))
        second.args = (module.graph.call_function(aten.reshape.default, (transposed, [6])), *second.args[1:])
    group_calls(module.graph)
    (together,) = [node for node in module.graph.nodes if node.target is REDUCE_ALL]
    assert together.args[0] == [made, transposed], "a transposition has another order of elements"


def test_parameters_of_two_engines_in_one_graph_are_called_for_apart() -> None:
    module = graph_with(8, cast=-1)
    for number, node in enumerate(module.graph.nodes):
        if node.target in (GATHER, REDUCE):
            place = 1 if node.target is GATHER else 2
            node.args = (*node.args[:place], number % 2, *node.args[place + 1 :])
    wanted = {GATHER: [], REDUCE: []}
    for node in module.graph.nodes:
        if node.target in wanted:
            wanted[node.target].append(
                (node.args[0 if node.target is GATHER else 1], node.args[1 if node.target is GATHER else 2])
            )
    group_calls(module.graph)
    found = {GATHER: [], REDUCE: []}
    for node in module.graph.nodes:
        if node.target is GATHER_ALL:
            found[GATHER] += [(shard, node.args[1]) for shard in node.args[0]]
        elif node.target is REDUCE_ALL:
            found[REDUCE] += [(shard, node.args[2]) for shard in node.args[1]]
    assert all(set(found[kind]) == set(wanted[kind]) and len(wanted[kind]) == 8 for kind in wanted)
    assert len({graph_id for _, graph_id in found[GATHER]}) == 2


def teacher_and_student(rank: int, world: int) -> None:
    torch.manual_seed(1)
    config = {"zero_optimization": {"stage": 3, "gather_at_one_rank": True}, "compile": MODES["compile"]}
    teacher, student = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    plain = copy.deepcopy((teacher, student))

    class Distilled(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model
            self.others: list[torch.nn.Module] = []  # not one of its own modules

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.others[0](x)
            return (self.model(x) - wanted).square().mean()

    model, reference = Distilled(student), Distilled(plain[1])
    deepcompile.initialize(teacher, torch.optim.SGD(teacher.parameters(), lr=0.1), config)
    model.others, reference.others = [teacher], [plain[0]]
    engine = deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    optimizer = torch.optim.SGD(plain[1].parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 8, generator=seeded(step))
        loss, expected = engine(x), reference(x)
        assert torch.allclose(loss, expected, rtol=1e-5)
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_that_reads_another_engines_parameters_trains_on_one_rank() -> None:
    run_ranks(1, teacher_and_student)


def few_calls(rank: int, world: int, accumulation: int, budget: str | None) -> tuple[list[float], dict[str, int]]:
    model = Model()
    config = {
        "zero_optimization": {"stage": 3, "gather_at_one_rank": True},
        "compile": MODES["inductor"],
        "gradient_accumulation_steps": accumulation,
        "memory_budget": budget,
    }
    engine = deepcompile.initialize(model, torch.optim.Adam(model.parameters(), lr=0.01), config)
    losses = train(engine, rank, range(6))
    assert "one rank reads its parameters where they lie" in str(engine.explain())
    engine.module.eval()
    with torch.no_grad():  # outside of a step a gather is a copy, made where it is used
        engine(torch.zeros(3, 64))
    return losses, engine.stats()


@pytest.mark.parametrize("budget", [None, "least"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_rank_trains_as_unsharded_and_gradients_become_the_buffers_where_those_were_let_go(
    accumulation: int, budget: str | None
) -> None:
    [(losses, stats)] = run_ranks(1, few_calls, accumulation, budget)
    assert losses == pytest.approx(unsharded(1, 6, accumulation)[0], rel=1e-5)
    assert stats["gradients_reduced"] == 6 * accumulation * PARAMETERS
    # In every update, that of biases, which are views of sums, like that of weights.
    assert stats["gradients_in_place"] == (6 * PARAMETERS if budget == "least" or DEVICE != "cpu" else 0)


def refuses(rank: int, world: int) -> None:
    shards = [torch.zeros(6), torch.zeros(6)]
    with pytest.raises(RuntimeError, match="2 shards and 1 shapes"):
        torch.ops.dc.gather_shards([s.to("meta") for s in shards], 0, [2, 3], [2])
    with pytest.raises(RuntimeError, match="fewer sizes than they should"):
        torch.ops.dc.gather_shards([s.to("meta") for s in shards], 0, [2, 3], [2, 2])
    with pytest.raises(RuntimeError, match="2 gradients for 1 shards and 2 flags"):
        torch.ops.dc.reduce_shards(shards, shards[:1], 0, [1, 1])


def test_lists_that_do_not_fit_together_are_refused() -> None:
    run_ranks(1, refuses)
