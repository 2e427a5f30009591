"""A multi-process service of CUDA: lets ranks that share a GPU run at the same time, not in turns.

What crashes in one rank ends all that share the service, so each of pytest's workers has one of its own, and a new one after
a test that failed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile

_CONTROL = "nvidia-cuda-mps-control"


class Service:
    """Of one worker. Without the program that controls services there is none, and ranks take turns."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="mps-") if shutil.which(_CONTROL) else None
        if self._folder is not None:
            subprocess.run([_CONTROL, "-d"], env=self._environment(), check=True, timeout=30)

    def for_ranks(self) -> dict[str, str]:
        """What tells a rank of it."""
        return {} if self._folder is None else {"CUDA_MPS_PIPE_DIRECTORY": self._folder}

    def stop(self) -> None:
        """Also ends processes that hang in it. One that does not answer is left behind."""
        if self._folder is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([_CONTROL], input=b"quit -t 2\n", env=self._environment(), check=False, timeout=30)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        assert self._folder is not None
        more = {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}
        return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | more
