"""A sharded model compiles as often as the plain one and breaks where the plain one does, counted by Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import deepcompile
from harness import run_ranks
from models import Run

#: How many times a batch is repeated, step by step: the same shape, two new ones, the first again.
REPEATS = (1, 1, 1, 2, 1, 3, 2)


def counts(rank: int, world: int, kind: str, sharded: bool) -> dict[str, Any]:
    """What Dynamo did in steps of several shapes with an evaluation between."""
    if kind.startswith("hf-"):
        import transformers_models  # noqa: F401 - registers the models in this process
    counters.clear()
    run = Run(kind)
    model = run.make()
    optimizer = run.optimizer(model.parameters())
    if sharded:
        zero: dict[str, Any] = {"stage": 3}
        if kind == "hf-mixtral":
            zero["leaf_modules"] = ["MixtralSparseMoeBlock"]
        engine = deepcompile.initialize(
            model,
            optimizer,
            {"zero_optimization": zero, "timeout": 60, "compile": {"backend": "aot_eager", "profile_steps": 2}},
        )
        forward, backward, update = engine, engine.backward, engine.step
    else:
        forward, backward = torch.compile(model, backend="aot_eager"), torch.Tensor.backward

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

    losses, compiled = [], []
    for step, repeat in enumerate(REPEATS):
        batch = torch.cat([run.batch(rank, step, 0)] * repeat)
        if step == 4:
            model.eval()
            with torch.no_grad():
                losses.append(forward(batch).item())
            model.train()
        loss = forward(batch)
        losses.append(loss.item())
        backward(loss)
        update()
        compiled.append(counters["stats"]["unique_graphs"])
    return {
        "graphs after each step": compiled,
        "frames": dict(counters["frames"]),
        "graph breaks": sum(counters["graph_break"].values()),
        "losses": losses,
    }


def assert_compiles_like_plain(kind: str) -> None:
    plain = run_ranks(1, counts, kind, False, timeout=400)[0]
    assert plain["graphs after each step"][0] > 0
    for rank, ours in enumerate(run_ranks(2, counts, kind, True, timeout=400)):
        for what in ("graphs after each step", "frames", "graph breaks"):
            assert ours[what] == plain[what], f"{what} of {kind} on rank {rank}"
        if rank == 0:
            assert ours["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "llama"])
def test_a_model_recompiles_and_breaks_no_oftener_than_under_plain_compile(kind: str) -> None:
    assert_compiles_like_plain(kind)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["hf-llama", "hf-gpt2", "hf-bert", "hf-t5", "hf-vit", "hf-mixtral", "hf-lora"])
def test_a_transformers_model_recompiles_and_breaks_no_oftener_than_under_plain_compile(kind: str) -> None:
    pytest.importorskip("transformers", reason="tests/requirements-transformers.txt installs it")
    assert_compiles_like_plain(kind)


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def guards(rank: int, world: int) -> str:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    model = TwoLayers()
    config = {"zero_optimization": {"stage": 3}, "timeout": 60, "compile": {"backend": "aot_eager"}}
    engine = deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    engine(torch.ones(2, 4))
    (entry,) = _debug_get_cache_entry_list(TwoLayers.forward.__code__)
    return str(entry.guard_manager)


def test_guards_are_on_the_classes_of_sharded_modules_and_not_on_what_their_properties_are_made_of() -> None:
    for found in run_ranks(2, guards):
        assert "_parameters['weight']" in found and "TYPE_MATCH" in found
        assert ".fget" not in found and "__closure__" not in found
