"""Simulated sums in switches beside published ones: each has a source."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "planner"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("in_switch", "methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import in_switch  # type: ignore[import-not-found]

    module: ModuleType = in_switch
    return module


def test_every_published_figure_has_who_said_it_and_where(bench: ModuleType) -> None:
    for figure in json.loads(bench.PUBLISHED.read_text())["figures"]:
        assert figure["source"].startswith("https://github.com/")
        assert figure["who"]
        assert figure["with"] == sorted(figure["with"])
        assert figure["without"] == sorted(figure["without"])


def test_the_file_is_of_the_published_figures(bench: ModuleType) -> None:
    found = json.loads(bench.RESULT.read_text())
    figures = json.loads(bench.PUBLISHED.read_text())["figures"]
    assert [{k: row[k] for k in figure} for row, figure in zip(found["rows"], figures, strict=True)] == figures


def test_the_simulator_says_today_what_the_file_says(bench: ModuleType) -> None:
    """Of two boxes: the model has not changed since. Sums in the switch gain 2 (n - 1) / n there, links being alike."""
    for row in json.loads(bench.RESULT.read_text())["rows"][:2]:
        again = bench.beside({k: row[k] for k in ("machine", "gpus")})["simulated"]
        for rate, pair in again.items():
            assert pair == pytest.approx(row["simulated"][rate], rel=1e-6)
            assert pair["with"] / pair["without"] == pytest.approx(2 * (row["gpus"] - 1) / row["gpus"], rel=0.01)
