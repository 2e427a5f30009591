"""The C++ library serves programs outside the project through its installed headers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **environment})
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(not (BUILD / "CMakeCache.txt").exists(), reason="needs the build tree of `make build`")
def test_an_executor_of_a_users_own_builds_against_the_installed_package_and_runs(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "package"
    run("cmake", "--install", str(BUILD), "--prefix", str(package))
    user = tmp_path / "user"
    run(
        "cmake", "-S", str(ROOT / "tests/python/cpp_user"), "-B", str(user), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
        f"-DCMAKE_PREFIX_PATH={package}", f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    run("cmake", "--build", str(user))
    # Of arange(6) and 2, each divided by two before the maximum: this rank's half.
    assert run(str(user / "cpp_user")) == "[1, 1, 1] 3\n"
