"""The build backend of ``pip install .``: scikit-build-core's, after a look at what the build needs.

The package is built for the PyTorch that will import it. So PyTorch is not among the build requirements: pip would fetch a
second one, of another version or with gigabytes of CUDA. An isolated build takes the one of the environment that pip
installs into, which an isolated interpreter (``python -I``) still sees.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Any

COMPILERS = ("c++", "g++", "clang++")
INSTALL = "pip install --no-build-isolation ."


def torch_version() -> str | None:
    """Of the PyTorch that the package is built for; cmake/FindPythonTorch.cmake looks in the same way."""
    for isolated in ([], ["-I"]):
        command = [sys.executable, *isolated, "-c", "import torch; print(torch.__version__)"]
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode == 0:
            return asked.stdout.strip()
    return None


def _has_module(name: str) -> bool:
    """A folder is none: this source tree has one of the name cmake."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def missing(tools: bool = True) -> list[str]:
    """What the build lacks, each with what installs it. Without ``tools``: before the front end has installed those."""
    found = []
    if torch_version() is None:
        found.append(
            f"PyTorch is not installed for {sys.executable}, and the package is built for the one that imports it: "
            f"pip install torch scikit-build-core cmake ninja, then {INSTALL}"
        )
    modules = ("scikit_build_core", "cmake", "ninja") if tools else ()
    absent = [name for name in modules if shutil.which(name) is None and not _has_module(name)]
    if absent:
        names = " ".join(name.replace("_", "-") for name in absent)
        found.append(f"{names.replace(' ', ', ')} not installed: pip install {names}, then {INSTALL}")
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else COMPILERS
    if not any(shutil.which(compiler) for compiler in compilers):
        found.append(f"there is no C++ compiler ({', '.join(compilers)}): on Debian, apt install g++ python3-dev")
    return found


def _require(tools: bool = True) -> None:
    if found := missing(tools):
        raise SystemExit("deepcompile cannot be built: " + "; ".join(found))


# What pip and other front ends call (PEP 517 and 660).


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    _require(tools=False)  # early, before anything is installed
    return ["cmake>=3.25", "ninja"]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    _require()
    from scikit_build_core import build

    return str(build.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _require()
    from scikit_build_core import build

    return str(build.build_wheel(wheel_directory, config_settings, metadata_directory))


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    _require()
    from scikit_build_core import build

    return str(build.prepare_metadata_for_build_editable(metadata_directory, config_settings))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _require()
    from scikit_build_core import build

    return str(build.build_editable(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    from scikit_build_core import build

    return str(build.build_sdist(sdist_directory, config_settings))


# What scikit-build-core calls for the dependencies (pyproject.toml).


def dynamic_metadata(field: str, settings: Any = None) -> list[str]:
    """A wheel fits the minor version of PyTorch that it was built for: later ones change what the library links to. It needs
    numpy, which PyTorch does not require, because objects that ranks exchange go through it.
    """
    assert field == "dependencies", field
    version = torch_version()
    return ["torch>=2.11" if version is None else f"torch=={'.'.join(version.split('.')[:2])}.*", "numpy"]
