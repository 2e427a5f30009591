"""``pip install .``: what it asks for, and what it installs."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import venv

import pytest
import torch

from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BACKEND = ROOT / "scripts" / "wheel"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HWY_ROOT", "CXX")}


def environment_of(folder: pathlib.Path, *, pip: bool = False, sees_torch: bool = False) -> pathlib.Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=pip, symlinks=True)
    if sees_torch:
        packages = pathlib.Path(torch.__file__).parents[1]
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def ask_backend(python: pathlib.Path, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(BACKEND)!r}); import deepcompile_build; print(deepcompile_build.{call})"
    )
    return subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, **environment}
    )


def test_without_torch_the_build_stops_and_says_what_to_install(tmp_path: pathlib.Path) -> None:
    done = ask_backend(environment_of(tmp_path / "empty"), "get_requires_for_build_wheel()")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "PyTorch is not installed" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr


def test_without_its_tools_the_build_stops_and_names_them(tmp_path: pathlib.Path) -> None:
    done = ask_backend(environment_of(tmp_path / "empty"), "build_wheel('.')", PATH="")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pip install scikit-build-core cmake ninja" in done.stderr
    assert "no C++ compiler" in done.stderr


def test_an_isolated_build_finds_the_torch_of_the_environment_that_is_installed_into(tmp_path: pathlib.Path) -> None:
    python = environment_of(tmp_path / "with-torch", sees_torch=True)
    # As pip isolates: a sitecustomize that drops the environment's packages.
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "sitecustomize.py").write_text(
        "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
    )
    plain = subprocess.run(
        [str(python), "-c", "import torch"], env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "overlay")}, timeout=120,
        capture_output=True,
    )  # fmt: skip
    assert plain.returncode != 0
    done = ask_backend(python, "dynamic_metadata('dependencies')", PYTHONPATH=str(tmp_path / "overlay"))
    minor = ".".join(torch.__version__.split(".")[:2])
    assert done.stdout.strip() == f"['torch=={minor}.*', 'numpy']", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_pip_installs_a_package_that_trains_and_needs_no_library_of_the_system(tmp_path: pathlib.Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    python = environment_of(tmp_path / "environment", pip=True, sees_torch=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--no-deps", str(tree)],
        capture_output=True, text=True, timeout=1200, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    program = """
import deepcompile, torch, importlib.metadata
engine = deepcompile.initialize(torch.nn.Linear(3, 2), torch.optim.SGD, {"compile": {"enabled": False}})
engine.backward(engine(torch.ones(4, 3)).sum())
assert engine.step()
print(deepcompile.__file__)
print(importlib.metadata.requires("deepcompile"))
"""
    trained = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    file, requires = trained.stdout.splitlines()
    package = pathlib.Path(file).parent
    assert package.is_relative_to(tmp_path)
    assert requires == f"['torch=={'.'.join(torch.__version__.split('.')[:2])}.*', 'numpy']"
    needed = subprocess.run(
        ["readelf", "-d", str(package / "lib" / "libdeepcompile.so")], capture_output=True, text=True, check=True
    )
    assert "libtorch_cpu" in needed.stdout
    assert "hwy" not in needed.stdout
    command = subprocess.run(
        [str(python.with_name("deepcompile")), "plan"], capture_output=True, text=True, timeout=120
    )
    assert "Try 'deepcompile plan --help'" in command.stderr


def test_make_build_leaves_the_package_importable_and_says_where_it_cannot(tmp_path: pathlib.Path) -> None:
    python = environment_of(tmp_path / "environment")
    where = [str(python), "-c", "import importlib.util as u; print(u.find_spec('deepcompile').origin)"]

    def importable(script: pathlib.Path) -> str:
        done = subprocess.run([str(script), str(python)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def found() -> pathlib.Path:
        done = subprocess.run(where, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=tmp_path)
        return pathlib.Path(done.stdout.strip())

    assert importable(ROOT / "scripts" / "importable") == ""
    assert found() == ROOT / "python" / "deepcompile" / "__init__.py"
    assert importable(ROOT / "scripts" / "importable") == ""

    other = tmp_path / "other"
    (other / "scripts").mkdir(parents=True)
    shutil.copy2(ROOT / "scripts" / "importable", other / "scripts")
    assert f"import deepcompile means {ROOT / 'python'}" in importable(other / "scripts" / "importable")
    assert found() == ROOT / "python" / "deepcompile" / "__init__.py"

    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    shutil.rmtree(site)
    site.write_text("not a folder, which root cannot write to either")
    assert "cannot be written" in importable(ROOT / "scripts" / "importable")
