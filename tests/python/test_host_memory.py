"""What a step frees stays with the process, so that the next step takes it without page faults."""

from __future__ import annotations

import ctypes
import resource
import statistics

import pytest
import torch

from deepcompile import dc
from harness import only_on_cpu, run_ranks

pytestmark = only_on_cpu("host memory")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def page_faults_of_a_step(rank: int, world: int) -> float:
    """Of a step that takes and frees eight tensors of six megabytes: the median of the last of twenty.

    The first steps do not count, and a later one now and then neither: aligned blocks leave splinters between them, around
    which the heap grows by a tensor or two at moments that depend on what else lies there.
    """
    libc = ctypes.CDLL(None)
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # as a fresh process has them, and fixed
        assert libc.mallopt(threshold, 128 << 10) == 1
    runtime = dc.Runtime(None, {"timeout": 20})
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1_500_000) for _ in range(8)]
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    runtime.cleanup()
    return statistics.median(faults[-11:])


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
