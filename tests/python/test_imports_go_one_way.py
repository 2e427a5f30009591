"""The packages of ``python/deepcompile`` in their order: each imports only from those before it, and modules of one package
do not import each other in a circle. Imports inside functions count, and so do those for type checkers, except between
modules of one package.
"""

from __future__ import annotations

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "python" / "deepcompile"

#: What stands before all packages: the native library, and what needs nothing else of deepcompile.
FIRST = ("_C", "_built_for", "_version", "plan", "safetensors")

PACKAGES = ("config", "runtime", "sharding", "compiler", "planning", "replay", "engine", "integrations")

#: The public surface, in its order.
LAST = ("comm", "dc", "shm", "__init__", "__main__")

PLACES = {name: place for place, name in enumerate((*FIRST, *PACKAGES, *LAST))}


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """By names like ``runtime.load``; a package without code of its own has none."""
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def package(module: str) -> str:
    return module.partition(".")[0]


def imports(file: pathlib.Path, known: dict[str, pathlib.Path]) -> list[tuple[str, int, bool]]:
    """(module, line, only for type checkers) of what a file imports of deepcompile."""
    tree = ast.parse(file.read_text())
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {id(inner) for node in checked for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > 0:
                assert file.parent.name == "plan", f"{file}:{node.lineno}: name the module from deepcompile on"
                continue  # of the package that stands by itself
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if package(name) == "deepcompile":
                name = name.removeprefix("deepcompile").removeprefix(".")
                if name not in known and name not in FIRST:  # what a module has, or deepcompile itself
                    name = name.rpartition(".")[0] or "__init__"
                found.append((name, node.lineno, id(node) in for_types))
    return found


def wrong_ways(root: pathlib.Path) -> list[str]:
    known, found = modules(root), []
    for module, file in known.items():
        assert package(module) in PLACES, f"{file}: put it into a package, or say here where it stands"
        for other, line, _ in imports(file, known):
            if PLACES[package(other)] > PLACES[package(module)]:
                found.append(f"{module}, line {line}: imports {other}, and {package(other)} comes later")
    return found


def circle(root: pathlib.Path) -> list[str]:
    known = modules(root)
    graph = {
        module: {other for other, _, for_types in imports(file, known) if not for_types}
        for module, file in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_each_package_imports_only_from_those_before_it() -> None:
    assert wrong_ways(ROOT) == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


LATER = "from deepcompile.planning.plans import a"


@pytest.mark.parametrize("line", [LATER, f"def f():\n    {LATER}", f"if TYPE_CHECKING:\n    {LATER}"])
def test_an_import_from_a_later_package_is_found(tmp_path: pathlib.Path, line: str) -> None:
    for name, text in (("config/keys.py", line), ("planning/plans.py", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (found,) = wrong_ways(tmp_path)
    assert found.startswith("config.keys, line ") and "planning comes later" in found


def test_a_circle_in_a_package_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "one.py").write_text("from deepcompile.config.two import a")
    (tmp_path / "config" / "two.py").write_text("def f():\n    from deepcompile.config import one")
    assert {"config.one", "config.two"} == set(circle(tmp_path))
