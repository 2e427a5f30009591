"""Highway's sources come from the Python index, pinned (cmake/fetch_highway.py)."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator

import pytest

from harness import only_on_cpu

pytestmark = only_on_cpu("has no tensors")

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "cmake" / "fetch_highway.py"
_spec = importlib.util.spec_from_file_location("fetch_highway", SCRIPT)
assert _spec is not None and _spec.loader is not None
fetch_highway = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fetch_highway)


@pytest.fixture
def index(tmp_path: pathlib.Path) -> Iterator[str]:
    """An index that has the file, with other contents."""
    page = tmp_path / "simple" / "numpy" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        f'<a href="../../files/other.tar.gz">a</a><a href="../../files/{fetch_highway.FILE}#sha256=0">b</a>'
    )
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / fetch_highway.FILE).write_bytes(b"not what was pinned")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_the_file_is_found_in_folders_first_and_in_every_index(index: str, tmp_path: pathlib.Path) -> None:
    local = tmp_path / "files" / fetch_highway.FILE
    settings = {"find-links": [str(tmp_path / "files")], "index-url": [index], "extra-index-url": [f"{index}/none"]}
    found = fetch_highway.addresses(settings)
    assert found[0] == local.as_uri()
    assert len(found) == 2
    assert found[1].startswith(f"{index.removesuffix('simple')}files/{fetch_highway.FILE}")


def test_a_file_with_another_hash_is_refused(index: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "highway"
    environment = {**os.environ, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": index, "PIP_FIND_LINKS": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(target)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 1
    assert f"not {fetch_highway.SHA256}" in done.stderr
    assert not target.exists()


def test_only_the_files_of_highway_are_unpacked(tmp_path: pathlib.Path) -> None:
    names = {
        f"{fetch_highway.INSIDE}/hwy/highway.h": b"header",
        f"{fetch_highway.INSIDE}/LICENSE": b"licence",
        f"{fetch_highway.INSIDE}/CMakeLists.txt": b"build",
        "numpy-2.3.4/setup.py": b"numpy",
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as files:
        for name, content in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            files.addfile(member, io.BytesIO(content))
    target = tmp_path / "highway"
    fetch_highway.unpack(archive.getvalue(), target)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
        "LICENSE",
        "hwy/highway.h",
    ]
    assert (target / "hwy" / "highway.h").read_bytes() == b"header"
