"""What a step frees stays with the process, so that the next step takes it without page faults."""

from __future__ import annotations

import resource

import pytest
import torch

from deepcompile import dc
from harness import run_ranks


def page_faults_of_a_step(rank: int, world: int) -> int:
    """Of a step that takes and frees eight tensors of six megabytes; the first ones do not count."""
    runtime = dc.Runtime(None, {"timeout": 20})
    for step in range(6):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1_500_000) for _ in range(8)]
        del tensors
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    runtime.cleanup()
    return faults // 3


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({}, True),
        ({"DEEPCOMPILE_MALLOC": "unchanged"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, False),
    ],
)
def test_a_step_takes_again_what_the_last_one_freed_unless_the_user_says_otherwise(
    environment: dict[str, str], keeps: bool
) -> None:
    faults = run_ranks(1, page_faults_of_a_step, environment=environment)[0]
    pages = 8 * 6_000_000 // 4096
    assert faults < pages // 20 if keeps else faults > pages // 2
