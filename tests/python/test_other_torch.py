"""A native library meets a PyTorch that it was not built for."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")

ROOT = pathlib.Path(__file__).resolve().parents[2]


def last_words(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def built_for(version: str) -> str:
    return f"""
import sys, types
sys.modules["deepcompile._built_for"] = types.SimpleNamespace(TORCH="{version}")
"""


def test_a_library_of_another_minor_version_says_both_versions_and_what_to_do() -> None:
    said = last_words(built_for("2.4.1+cu121") + "import deepcompile")
    assert said.startswith(
        f"ImportError: deepcompile was built for PyTorch 2.4.1+cu121, and this is PyTorch {torch.__version__}. "
    )
    assert "`pip install --no-build-isolation .`" in said


def test_a_symbol_that_another_patch_version_lacks_becomes_the_same_sentence() -> None:
    other = ".".join(torch.__version__.split(".")[:2]) + ".77"
    program = f"""
from deepcompile.runtime.fits import why_not_loaded
raise ImportError(why_not_loaded("{torch.__version__}", ImportError("undefined symbol: _ZN3c10")))
"""
    said = last_words(
        built_for(other) + "sys.modules['deepcompile'] = types.ModuleType('deepcompile')\n"
        f"sys.modules['deepcompile'].__path__ = ['{ROOT}/python/deepcompile']" + program
    )
    assert said.startswith(
        f"ImportError: deepcompile was built for PyTorch {other}, and this is PyTorch {torch.__version__}."
    )
    assert said.endswith("(undefined symbol: _ZN3c10)")


@pytest.mark.parametrize("command", ["make build", "pip install"])
def test_a_source_tree_that_is_not_built_says_how(tmp_path: pathlib.Path, command: str) -> None:
    package = tmp_path / "deepcompile"
    package.mkdir()
    for source in (ROOT / "python" / "deepcompile").rglob("*.py"):
        if source.name != "_built_for.py":
            copy = package / source.relative_to(ROOT / "python" / "deepcompile")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text())
    said = last_words(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import deepcompile")
    assert said.startswith("ImportError: deepcompile's native library is not built")
    assert command in said
