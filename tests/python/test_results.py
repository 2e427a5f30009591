"""The stored results of benchmarks are complete, and docs/results.md is what they give."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest

from harness import only_on_cpu

pytestmark = only_on_cpu("no tensor is here")

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def load_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stored_results", BENCHMARKS / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


results = load_module()


def a_row() -> dict[str, Any]:
    row = results.Row("step", 10.0, "ms", "lower", "FSDP2", 15.0, 1.5, 1.6, "ratio", False)
    return dataclasses.asdict(row)


def a_result() -> dict[str, Any]:
    result = results.Result("A step", "2 cores", "2026-01-01", "abc", "2.13.0", "python x.py", "measured", "", [], [])
    return dataclasses.asdict(result) | {"rows": [a_row()]}


def written(folder: pathlib.Path, result: dict[str, Any]) -> pathlib.Path:
    path = folder / "one.json"
    path.write_text(json.dumps(result))
    return path


def test_results_page_is_what_the_stored_files_give() -> None:
    assert results.PAGE.read_text() == results.page(results.stored()), "run python benchmarks/results.py"


def test_stored_results_are_complete_and_name_no_path() -> None:
    paths = sorted(results.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        result = results.load(path)
        for words in (result.machine, result.command, result.conditions):
            assert "/home" not in words and "/root" not in words and "/tmp" not in words, path


@pytest.mark.parametrize("key", ["value", "better", "met", "bar", "unit"])
def test_row_without_a_field_is_refused(tmp_path: pathlib.Path, key: str) -> None:
    result = a_result()
    del result["rows"][0][key]
    with pytest.raises(results.BadResult, match=f"one.json, row 1: {key} missing"):
        results.load(written(tmp_path, result))


@pytest.mark.parametrize("key", ["machine", "date", "commit", "command"])
def test_result_without_its_origin_is_refused(tmp_path: pathlib.Path, key: str) -> None:
    with pytest.raises(results.BadResult, match=key):
        results.load(written(tmp_path, a_result() | {key: ""}))


def test_row_that_calls_a_missed_bar_met_is_refused(tmp_path: pathlib.Path) -> None:
    result = a_result()
    result["rows"][0]["met"] = True
    with pytest.raises(results.BadResult, match="by its figures it is False"):
        results.load(written(tmp_path, result))


def test_two_rows_of_one_name_and_peer_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(results.BadResult, match="more than once"):
        results.load(written(tmp_path, a_result() | {"rows": [a_row(), a_row()]}))


def test_missed_bars_stand_at_the_top_of_the_page(tmp_path: pathlib.Path) -> None:
    text = results.page([results.load(written(tmp_path, a_result()))])
    top, section = text.split("## A step")
    assert "| step | ratio 1.5 | ratio at least 1.6 | A step (2026-01-01) |" in top
    assert "**missed**" in section


def test_stored_result_is_read_back_unchanged(tmp_path: pathlib.Path) -> None:
    result = results.load(written(tmp_path, a_result()))
    results.store(result, tmp_path / "two.json")
    assert results.load(tmp_path / "two.json") == result
