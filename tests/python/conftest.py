"""Tests run real processes (see harness.py). On a GPU each worker of pytest-xdist has a multi-process service of its own."""

from __future__ import annotations

import os

import pytest

import harness
from gpu_service import Service

_own: list[Service] = []


def _renew() -> None:
    for service in _own:
        service.stop()
    _own[:] = [Service()]
    if where := _own[0].for_ranks():
        harness.use_service(where)


def pytest_sessionstart() -> None:
    if harness.DEVICE == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        _renew()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _own:
        _renew()


def pytest_sessionfinish() -> None:
    for service in _own:
        service.stop()
