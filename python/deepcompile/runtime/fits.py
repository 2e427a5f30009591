"""Checks that the native library was built for the installed PyTorch; else loading it would fail with a missing symbol."""

from __future__ import annotations

_AGAIN = "Build it for this one: `make build PYTHON=...` in the source tree, or `pip install --no-build-isolation .`"


def require_fit(torch_version: str) -> None:
    """Raises ImportError if the library was built for another minor version of PyTorch, or was not built."""
    try:
        from deepcompile._built_for import TORCH as built_for  # written by the build
    except ImportError:
        raise ImportError(
            "deepcompile's native library is not built: `make build` in the source tree, or `pip install "
            "--no-build-isolation .`"
        ) from None
    if _minor(built_for) != _minor(torch_version):
        raise ImportError(_other(torch_version, built_for))


def why_not_loaded(torch_version: str, error: ImportError) -> str:
    """Explains an error of the dynamic loader."""
    from deepcompile._built_for import TORCH as built_for

    if built_for != torch_version:
        return f"{_other(torch_version, built_for)} ({error})"
    return f"deepcompile's native library cannot be loaded: {error}"


def _other(torch_version: str, built_for: str) -> str:
    return f"deepcompile was built for PyTorch {built_for}, and this is PyTorch {torch_version}. {_AGAIN}"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
