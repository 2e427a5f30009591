"""The default process group that the package makes where the program has made none."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from harness import only_on_cpu

pytestmark = only_on_cpu("asks for groups of the CPU")

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: Registered before deepcompile's own, so it runs after it.
AT_EXIT = """
import atexit
import torch.distributed as dist

atexit.register(lambda: print("at exit:", "a group" if dist.is_initialized() else "no group"))
"""


def run(program: str, **launcher: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    environment |= {"PYTHONPATH": str(ROOT / "python"), **launcher}
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT + program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "call",
    [
        "deepcompile.init_distributed()",
        "deepcompile.shard(torch.nn.Linear(3, 2), {})",
        "deepcompile.initialize(torch.nn.Linear(3, 2), torch.optim.SGD, {'compile': {'enabled': False}})",
        "deepcompile.shard(make_inside(), {})",
    ],
    ids=["init_distributed", "shard", "initialize", "init_sharded"],
)
def test_without_a_launcher_there_is_a_world_of_one_until_the_program_ends(call: str) -> None:
    program = f"""
import deepcompile, torch

def make_inside():
    with deepcompile.init_sharded():
        return torch.nn.Linear(3, 2)

{call}
print(dist.get_world_size(), "rank,", dist.get_backend())
"""
    assert run(program) == "1 rank, gloo\nat exit: no group\n"


def test_the_ranks_of_a_launcher_are_taken_from_its_environment() -> None:
    program = """
import deepcompile, torch
try:
    deepcompile.shard(torch.nn.Linear(3, 2), {})
except ValueError as error:
    print("WORLD_SIZE" in str(error))
"""
    assert run(program, RANK="0", MASTER_ADDR="127.0.0.1") == "True\nat exit: no group\n"


def test_a_group_that_the_program_made_is_the_programs_to_destroy() -> None:
    program = """
import deepcompile, torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mine = dist.group.WORLD
deepcompile.init_distributed()
deepcompile.shard(torch.nn.Linear(3, 2), {})
assert dist.group.WORLD is mine
"""
    assert run(program) == "at exit: a group\n"
