"""Rates beside those of others: the closed forms are right, no row of the file is below."""

import json
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "planner"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("beside_others", "methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import beside_others  # type: ignore[import-not-found]

    module: ModuleType = beside_others
    return module


def test_closed_forms_are_those_of_the_books(bench: ModuleType) -> None:
    link = bench.LANE
    for dimensions in (2, 3, 4):
        assert bench.exchanged(bench.hypercube(dimensions)) == 2 * link, "half of the bits differ, each on a link"
    for side in (4, 6):
        assert bench.exchanged(bench.grid(side, side, around=True)) == Fraction(8 * link, side)
    assert bench.exchanged(bench.complete_bipartite(4)) == Fraction(32 * link, 10), "four at one hop, three at two"
    assert bench.gathered(bench.grid(3, 3, around=False)) == Fraction(2 * link * 9, 8), "a corner has two links"


@pytest.mark.parametrize(("degree", "length", "ranks"), [(2, 2, 6), (2, 3, 12), (3, 2, 12)])
def test_kautz_graphs_have_their_ranks_degree_and_diameter(
    bench: ModuleType, degree: int, length: int, ranks: int
) -> None:
    t = bench.kautz(degree, length)
    assert t.n == ranks
    for at in range(t.n):
        assert sum(k.src == at for k in t.links) == sum(k.dst == at for k in t.links) == degree
        reached = {at}
        for _ in range(length):
            reached |= {k.dst for k in t.links if k.src in reached}
        assert len(reached) == t.n


def test_a_rate_below_another_one_is_told_unless_it_is_proved_to_be_the_most(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    some = [row for row in bench.rows() if row.topology.name in ("dgx-1v", "Kautz 2,2")]
    monkeypatch.setattr(bench, "rows", lambda: some)
    assert bench.main(["-o", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["proved"] for row in found["rows"]] == [True] * len(some)
    assert [Fraction(row["part"]) < 1 for row in found["rows"]] == [row.topology.name != "dgx-1v" for row in some]
    found["rows"][0] |= {"part": "9/10", "proved": False}
    assert [line.split(":")[0] for line in bench.below(found["rows"])] == ["dgx-1v allgather"]


def test_every_rate_of_the_file_is_proved(bench: ModuleType) -> None:
    found = json.loads(bench.RESULT.read_text())
    assert all(row["proved"] for row in found["rows"])
