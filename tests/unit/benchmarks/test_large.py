"""Machines of hundreds of GPUs: usual ones, and drawn ones, which are drawn the same again."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.pages import planner

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "planner"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("large", "large_machines", "drawn_machines", "methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import large  # type: ignore[import-not-found]

    module: ModuleType = large
    return module


def test_drawn_machines_are_of_all_kinds_and_the_same_again(bench: ModuleType) -> None:
    some = [bench.built(seed) for seed in range(40)]
    assert all(64 < t.n <= 512 for _, t in some)
    assert len(Counter(name.split(",")[0] for name, _ in some)) == 8
    assert sum("dead" in name for name, _ in some) > 10
    assert bench.built(7)[1].fingerprint == some[7][1].fingerprint


def test_usual_machines_have_the_ranks_that_their_names_say(bench: ModuleType) -> None:
    for name in bench.USUAL:
        ranks = [int(word) for word in name.split() if word.isdigit() and int(word) > 64]
        assert not ranks or bench.built(name)[1].n == ranks[0], name


def test_a_row_has_all_that_the_table_shows(bench: ModuleType) -> None:
    row = bench.judged(("80 GPUs, leaf and spine", "allreduce"))
    assert row["of_bound"] == 1
    assert row["depth"] <= 4
    assert row["scheme"] == "tiers"
    drawn = bench.judged((6, "broadcast"))
    assert drawn["seed"] == 6
    assert planner.large({"hardware": {"cpu": "a"}, "commit": None, "rows": [row, drawn]}).count("|\n") == 6


def test_the_file_has_every_collective(bench: ModuleType) -> None:
    found = json.loads(bench.RESULT.read_text())
    assert {row["collective"] for row in found["rows"]} == set(bench.COLLECTIVES)
