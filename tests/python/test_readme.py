"""What README.md shows runs as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from harness import only_on_cpu

pytestmark = only_on_cpu("the example's model is on the CPU")

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Set by launchers; the example is to run without one.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


def first_example() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [((), 1), (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), 2)],
    ids=["python", "torchrun"],
)
def test_the_first_example_of_the_readme_trains(launcher: tuple[str, ...], ranks: int, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(first_example())
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    environment |= {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        capture_output=True,
        text=True,
        timeout=140,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 1
    assert losses[0] < 0.1
    assert f"over {ranks} ranks" in done.stdout  # engine.explain()
    assert "Warning" not in done.stderr, done.stderr
    assert "destroy_process_group" not in done.stderr, done.stderr
