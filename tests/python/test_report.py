"""What an engine says of itself, and the parity check that users run."""

from __future__ import annotations

import json
import logging
import pathlib

import pytest
import torch
from torch import nn

import deepcompile
from harness import DEVICE, run_ranks
from models import Llama, seeded


def trained(compiles: object, path: str = "", stage: int = 3, steps: int = 6) -> tuple[deepcompile.Engine, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepcompile")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    model = Llama()
    config = {"zero_optimization": {"stage": stage}, "timeout": 60, "compile": compiles}
    engine = deepcompile.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    if path:
        engine.trace(path)
    for step in range(steps):
        engine.backward(engine(Llama.batch(seeded(step))))
        engine.step()
    return engine, records


def explains(rank: int, world: int, path: str) -> None:
    engine, records = trained({"backend": "aot_eager"}, f"{path}/{rank}.json")
    rows = dict(engine.explain().rows)
    assert rows["sharding"] == f"ZeRO-3 over 2 ranks; this is rank {rank}"
    assert "from measured times" in rows["plan"]
    for key in ("predicted step", "measured step", "predicted peak", "kept to the backward"):
        assert rows[key]
    assert ("exposed collectives" in rows) == (DEVICE == "cpu")  # elsewhere it is the device that waits
    if DEVICE == "cpu":
        assert ("caller's thread" in rows["exposed collectives"]) == engine.sharding.collectives_stop_compute
        assert all(waited > 0 for waited in engine.times.waited)
    assert "decisions, the most exposed first" in str(engine.explain())
    said = [line for line in records if line.startswith("deepcompile: ZeRO-3 on 2 ranks, plan '")]
    assert len(said) == (1 if rank == 0 else 0)
    events = json.loads(pathlib.Path(path, f"{rank}.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"read", "gradient", "gather", "reduction"}
    assert all(event["dur"] >= 0 for event in spans)
    assert "embed.weight" in {event["name"] for event in spans}


def test_explain_tells_the_plan_with_predicted_and_measured_times_and_trace_writes_a_step(tmp_path) -> None:
    run_ranks(2, explains, str(tmp_path))


def explains_nothing_compiled(rank: int, world: int) -> None:
    engine, _ = trained(False)
    rows = dict(engine.explain().rows)
    assert rows["compiled"].startswith("no: config key")
    assert "plan" not in rows and rows["steps"] == "6 taken, 0 skipped"


def test_an_engine_that_compiles_nothing_says_so_and_why() -> None:
    run_ranks(1, explains_nothing_compiled)


def broken_up(rank: int, world: int) -> None:
    from test_backend import WithGraphBreak

    model = WithGraphBreak()
    engine = deepcompile.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"timeout": 60, "compile": {"backend": "aot_eager"}}
    )
    said = []
    for step in range(4):
        engine.backward(engine(Llama.batch(seeded(step))))
        engine.step()
        said.append(dict(engine.explain().rows))
    assert said[2]["plan"].startswith("none for the step as a whole: the step is spread over several graphs")
    # The blocks and the norm behind them are graphs; the loop around the blocks, which share code, is not compiled.
    assert said[3]["compiled"].startswith("the step lies in 6 graphs, 3 of the forward and 3 of the backward")
    assert "gathers start before the graph that reads them" in said[3]["across graphs"]


def test_a_step_in_several_graphs_is_told_so() -> None:
    run_ranks(2, broken_up)


def parity(rank: int, world: int) -> None:
    batch = Llama.batch(seeded(rank))
    for stage in (1, 3):
        config = {"zero_optimization": {"stage": stage}, "compile": {"backend": "aot_eager"}, "gradient_clipping": 0.5}
        found = deepcompile.check_parity(Llama, batch, config)
        assert found.largest < 1e-5, str(found)

    class Differs(nn.Module):
        """Rank 1 computes something else: the check must see it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.sharded_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wrong = rank == 1 and hasattr(self.layer._parameters["weight"], "full_shape")
            return self.layer(x).sum() * (1.5 if wrong else 1.0)

    found = deepcompile.check_parity(Differs, torch.ones(2, 3), {"compile": False})
    assert found.gradient.value > 0.1 and "layer." in found.gradient.where
    assert found.loss.value > 0.1  # seen on rank 1, told on both


def test_the_parity_check_finds_none_in_a_right_model_and_names_a_wrong_gradient() -> None:
    run_ranks(2, parity)


def parity_with_loss(rank: int, world: int) -> None:
    found = deepcompile.check_parity(
        lambda: nn.Linear(4, 2),
        torch.ones(3, 4) * rank,
        {"compile": False},
        loss_fn=lambda model, batch: model(batch).square().mean(),
    )
    assert found.largest < 1e-5


def test_the_parity_check_takes_a_loss_function() -> None:
    run_ranks(3, parity_with_loss)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_one_and_two_gather_once_a_step(stage: int) -> None:
    launched = run_ranks(2, gathers_of_steps, stage)[0]
    assert len(set(launched)) == 1 and launched[0] == len(list(Llama().parameters()))


def gathers_of_steps(rank: int, world: int, stage: int) -> list[int]:
    engine, _ = trained({"backend": "aot_eager"}, stage=stage, steps=4)
    found = []
    for step in range(2):
        before = engine.stats()["gathers_launched"]
        engine.backward(engine(Llama.batch(seeded(step))))
        engine.step()
        found.append(engine.stats()["gathers_launched"] - before)
    return found


def traces_from_the_middle(rank: int, world: int, folder: str) -> None:
    engine, _ = trained({"mode": "off"}, f"{folder}/first-{rank}.json")
    path = pathlib.Path(folder, f"{rank}.json")
    loss = engine(Llama.batch(seeded(0)))
    engine.trace(path)
    engine.backward(loss)
    engine.step()
    assert not path.exists()  # half a step
    engine.backward(engine(Llama.batch(seeded(1))))
    engine.step()
    assert json.loads(path.read_text())["traceEvents"]


def test_a_trace_asked_for_within_a_step_is_of_the_next_one(tmp_path) -> None:
    run_ranks(2, traces_from_the_middle, str(tmp_path))
