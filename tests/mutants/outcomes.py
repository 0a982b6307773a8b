"""A plugin of pytest, ``-p tests.mutants.outcomes --outcomes FILE``: how each test ended, and whether it is long."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, str | bool]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._found[item.nodeid] = {"outcome": "not run", "long": item.get_closest_marker("long") is not None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._found[report.nodeid]["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._found), encoding="utf-8")
