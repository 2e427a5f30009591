"""How many bytes this process can still allocate: on a device, or on the host within the limits of its container."""

from __future__ import annotations

import os
import pathlib
import platform
from collections.abc import Iterator

import torch


def memory_name(device: torch.device) -> str:
    """Identifies the memory: the same name on all ranks that share it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return platform.node() or "host"


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now on the device (on the host for CPU)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_of_the_host(), *container_memory(), 1 << 62)


def _of_the_host() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def container_memory(
    membership: str | os.PathLike[str] = "/proc/self/cgroup", mount: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> Iterator[int]:
    """For each memory limit of a control group (version 1 or 2) of this process, the bytes that are left. The kernel drops
    inactive file cache before it enforces a limit, so that cache does not count as used.
    """
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        return  # no control groups here
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _left_up_to(pathlib.Path(mount), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = pathlib.Path(mount) / "memory"
            yield from _left_up_to(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_up_to(root: pathlib.Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The bytes left in the group and in each group that contains it. (A container may see its own group as the root.)"""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        if folder != root and root not in folder.parents:
            return
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # the group is not visible from here, or has no limit of its own
        if most != "max":
            yield max(0, int(most) - used + int(stat.get(reclaimable, 0)))
