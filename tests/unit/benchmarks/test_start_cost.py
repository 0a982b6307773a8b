"""benchmarks/start_cost.py: what it measures is a process's own, of each checkout and with bytecode or none."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import ROOT
from tests.unit.benchmarks.scripts import script


@pytest.fixture(scope="module")
def start_cost() -> ModuleType:
    return script("start_cost")


@pytest.mark.slow
@pytest.mark.long
def test_a_start_is_measured_and_is_a_row_and_a_line(start_cost: ModuleType, tmp_path: Path) -> None:
    kept = start_cost.Place("here", ROOT, start_cost.KEPT)
    none = kept._replace(bytecode=start_cost.NONE)
    found, mpi = start_cost.measured([kept, none], [2], 1, 120, tmp_path)
    assert mpi
    rows = start_cost.rows_of(found)
    what = {start_cost.BARE, start_cost.PACKAGE, start_cost.RANKS, *(f"blinkmpi {one}" for one in start_cost.COMMANDS)}
    assert {(row["what"], row["bytecode"]) for row in rows} == {(one, b) for one in what for b in ("kept", "none")}
    for row in rows:
        assert len(row["cpu_s"]) == len(row["modules"]) == len(row["ours"]) == (row["ranks"] or 1)
        assert all(low <= at <= high for low, at, high in row["spread_s"])
        assert all(0 < s < 60 for s in row["cpu_s"])
        assert (row["what"] == start_cost.BARE) == (row["ours"] == [0])
    ranks = next(row for row in rows if row["ranks"])
    assert ranks["ours"][0] > ranks["ours"][1], "rank 0 plans"
    assert len(list(start_cost.table(rows))) == 1 + len(rows)
    ours = ROOT.relative_to("/") / "blinkmpi"
    assert list((kept.kept_in(tmp_path) / ours).glob("*.pyc"))
    assert not (none.kept_in(tmp_path) / ours).exists()
    assert list(none.kept_in(tmp_path).rglob("*.pyc")), "that of other packages is kept"


def test_what_fails_is_said(start_cost: ModuleType, tmp_path: Path) -> None:
    place = start_cost.Place("here", ROOT, start_cost.KEPT)
    with pytest.raises(SystemExit, match="here: exit status 1"):
        start_cost.of_process(place, tmp_path, "raise ValueError")
