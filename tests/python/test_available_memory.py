"""What the host has free for a plan, within the limits of the container."""

from __future__ import annotations

import pathlib

import pytest

from deepcompile.planning.available_memory import container_memory


def group(folder: pathlib.Path, limit: str, used: int, files: int, version: int) -> None:
    names = {2: ("memory.max", "memory.current", "inactive_file")}.get(
        version, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {files}\nactive_file 7\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container_is_what_its_groups_leave_without_unused_files(tmp_path, version: int) -> None:
    root = tmp_path / "cgroup"
    memory = root / "memory" if version == 1 else root
    group(memory / "jobs" / "mine", "1000", used=700, files=100, version=version)
    group(memory / "jobs", "5000", used=4800, files=0, version=version)
    membership = tmp_path / "self"
    membership.write_text("0::/jobs/mine\n" if version == 2 else "3:cpu,cpuacct:/other\n2:memory:/jobs/mine\n")
    assert sorted(container_memory(membership, root)) == [200, 400]


def test_a_container_that_sees_its_group_as_the_root_is_limited_by_it(tmp_path) -> None:
    root = tmp_path / "cgroup"
    group(root, "1000", used=400, files=0, version=2)
    membership = tmp_path / "self"
    membership.write_text("0::/docker/0123\n")  # as the host has it
    assert list(container_memory(membership, root)) == [600]


def test_groups_without_a_limit_leave_everything(tmp_path) -> None:
    root = tmp_path / "cgroup"
    group(root / "user", "max", used=400, files=0, version=2)
    membership = tmp_path / "self"
    membership.write_text("0::/user\n")
    assert list(container_memory(membership, root)) == []
    assert list(container_memory(tmp_path / "missing", root)) == []
