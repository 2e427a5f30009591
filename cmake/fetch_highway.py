"""Brings Highway's sources into a folder: they are part of numpy's source distribution, which every Python index has.

    python cmake/fetch_highway.py FOLDER

The Python index has no package of Highway itself. The distribution is pinned by version and hash, taken from where pip takes
its packages (index-url, extra-index-url and find-links), and not built: only Highway's files are unpacked.
"""

from __future__ import annotations

import hashlib
import html.parser
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request

FILE = "numpy-2.3.4.tar.gz"
SHA256 = "a7d018bfedb375a8d979ac758b120ba846a7fe764911a64465fd87b8729f4a6a"
#: Of the distribution: what is in here becomes FOLDER/hwy, the licence FOLDER/LICENSE.
INSIDE = "numpy-2.3.4/numpy/_core/src/highway"


class _Links(html.parser.HTMLParser):
    """The addresses on a page of an index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def pip_settings() -> dict[str, list[str]]:
    """index-url, extra-index-url and find-links, as pip has them. Isolated (-I), so that it is the environment's own pip
    where this runs inside an isolated build.
    """
    asked = subprocess.run([sys.executable, "-I", "-m", "pip", "config", "list"], capture_output=True, text=True)
    settings: dict[str, list[str]] = {"index-url": [], "extra-index-url": [], "find-links": []}
    for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].replace("_", "-")
        if name in settings:
            settings[name] = (
                value.strip("'\"").replace("\\n", " ").split()
            )  # later lines rule: the environment comes last
    for name in settings:
        if value := os.environ.get("PIP_" + name.upper().replace("-", "_")):
            settings[name] = value.split()
    return settings


def addresses(settings: dict[str, list[str]]) -> list[str]:
    """Where the file may be, nearest first; indexes are asked."""
    found = []
    for place in settings["find-links"]:
        local = pathlib.Path(place.removeprefix("file://")).expanduser() / FILE
        if local.is_file():
            found.append(local.resolve().as_uri())
    for index in [*settings["extra-index-url"], *(settings["index-url"] or ["https://pypi.org/simple"])]:
        page = f"{index.rstrip('/')}/numpy/"
        try:
            text = _read(page).decode()
        except (OSError, ValueError):
            continue  # the next one may have it
        links = _Links()
        links.feed(text)
        found += [
            urllib.parse.urljoin(page, link)
            for link in links.found
            if pathlib.PurePosixPath(urllib.parse.urlparse(link).path).name == FILE
        ]
    return found


def _read(address: str) -> bytes:
    request = urllib.request.Request(address, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
        return content


def unpack(archive: bytes, folder: pathlib.Path) -> None:
    """First beside ``folder``, so that it is there whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            inside = member.name.removeprefix(f"{INSIDE}/")
            if not member.isfile() or not (inside.startswith("hwy/") or inside.startswith("LICENSE")):
                continue
            content = files.extractfile(member)
            assert content is not None
            target = partial / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def main(folder: pathlib.Path) -> int:
    trouble = ["no index that pip uses has it"]
    for address in addresses(pip_settings()):
        try:
            archive = _read(address)
        except OSError as error:
            trouble.append(str(error))
            continue
        if (found := hashlib.sha256(archive).hexdigest()) != SHA256:
            trouble.append(f"what came has the hash {found}, not {SHA256}")
            continue
        unpack(archive, folder)
        return 0
    print(f"Highway's sources could not be fetched as part of {FILE}: {trouble[-1]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
