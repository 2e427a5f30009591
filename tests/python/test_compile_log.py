"""What the package says while a model compiles."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import deepcompile
from harness import run_ranks


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def messages_of_a_step(rank: int, world: int, backend: str) -> list[str]:
    heard = Messages()
    logging.getLogger("deepcompile").addHandler(heard)
    logging.getLogger("deepcompile").setLevel(logging.INFO)
    model = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 5))
    engine = deepcompile.initialize(model, torch.optim.SGD(model.parameters()), {"compile": {"backend": backend}})
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
    return [text for text in heard.texts if text.startswith("compil")]


@pytest.mark.parametrize(("world", "backend"), [(2, "inductor"), (2, "aot_eager"), (1, "inductor")])
def test_rank_0_says_what_is_compiled_before_it_is_and_how_long_it_took(world: int, backend: str, tmp_path) -> None:
    # What is in a compiler's cache need not be compiled.
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, *others = run_ranks(world, messages_of_a_step, backend, environment=empty)
    assert first[0] == "compiling the forward of Sequential"
    for phase in ("forward", "backward"):
        begin = first.index(f"compiling the {phase} of Sequential")
        ends = [i for i, text in enumerate(first) if text.startswith(f"compiled the {phase} of Sequential in ")]
        assert ends and ends[0] > begin
        assert first[ends[0]].endswith(" s")
    assert all(texts == [] for texts in others)
