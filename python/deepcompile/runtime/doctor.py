"""``deepcompile doctor``: what is active on this machine, and why something is not."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from deepcompile._version import __version__
from deepcompile.runtime.cuda_parts import cuda_available, require_cuda, why_no_cuda


def _cuda() -> str:
    if not cuda_available():
        return f"no: {why_no_cuda()}"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = properties.total_memory / 2**30
    count = torch.cuda.device_count()
    return f"yes: {count} GPU{'s' if count > 1 else ''}, {properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}"


def _nccl() -> str:
    if not cuda_available():
        return "no: it serves CUDA alone"
    try:
        version = require_cuda().nccl_version()
    except RuntimeError as error:
        return f"no: {error}"
    return f"yes: {version // 10000}.{version // 100 % 100}.{version % 100}"


def _shared_memory() -> str:
    choice = os.environ.get("DEEPCOMPILE_COMMUNICATOR", "auto")
    return "no: DEEPCOMPILE_COMMUNICATOR=c10d" if choice == "c10d" else "yes, where the ranks prove to share a host"


def report_lines() -> dict[str, str]:
    """The lines of the report, by name."""
    return {
        "deepcompile": __version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "cores": f"{len(os.sched_getaffinity(0))} for this process",
        "shared-memory collectives": _shared_memory(),
        "gloo": "yes" if dist.is_gloo_available() else "no: this PyTorch was built without it",
        "CUDA": _cuda(),
        "NCCL": _nccl(),
    }


def main() -> int:
    lines = report_lines()
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:{width}}  {value}")
    return 0
