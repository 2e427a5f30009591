"""The command ``deepcompile``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deepcompile
from deepcompile.__main__ import main
from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")


def test_simulate_compares_the_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "simulate --model gpt2-small --machine 8xa100 --nodes 1 --batch 1 --seq 512 --accumulate 1 --compare"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert all(strategy in out for strategy in ("on_demand", "per_block", "published", "planned"))


def test_an_unknown_model_is_an_error_that_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "llama3-80b", "--machine", "8xh100"]) != 0
    assert "llama3-8b" in capsys.readouterr().err


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("consolidate", "plan", "simulate"))


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", str(tmp_path), f"{tmp_path}/out.safetensors"]) == 1
    assert "deepcompile:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["plan"], ["simulate", "--model"], ["simulate", "--modle", "x"], ["simulat"], ["consolidate"], [], ["--machine"]],
    ids=str,
)
def test_a_usage_error_names_a_command_that_exists(wrong: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "deepcompile", *wrong], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "python -m deepcompile" in done.stderr
    named = done.stderr.partition("Try '")[2].partition("'")[0]
    if wrong and wrong[0] in ("plan", "simulate"):
        assert named == f"python -m deepcompile {wrong[0]} --help"
        helped = subprocess.run([sys.executable, *named.split()[1:]], capture_output=True, text=True, timeout=120)
        assert helped.returncode == 0
        assert f"python -m deepcompile {wrong[0]} " in helped.stdout


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"deepcompile {deepcompile.__version__}\n"
