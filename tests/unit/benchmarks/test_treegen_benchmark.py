"""The planner's benchmark: every family can be planned at its smallest, rows that fail say so, the picture is drawn."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "planner"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "treegen", raising=False)
    import treegen  # type: ignore[import-not-found]

    monkeypatch.setattr(treegen, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(treegen, "calibration", lambda: 0.06)
    module: ModuleType = treegen
    return module


def test_every_family_is_planned_at_its_smallest(bench: ModuleType) -> None:
    for name, family in bench.FAMILIES.items():
        t = family.build(family.sizes[0])
        assert t.n == family.gpus(family.sizes[0])
        assert list(family.sizes) == sorted(family.sizes)
        row = bench.planned(name, family.sizes[0], "broadcast")
        assert row["of_bound"] <= 1
        assert row["seconds_in_loops"] == row["seconds"] / 0.06
        assert bench.line_of({"family": name, "gpus": t.n, "collective": "broadcast", **row}).count("GB/s") == 1


def test_degraded_machines_differ_from_whole_ones(bench: ModuleType) -> None:
    slow = bench.slow_card(2)
    assert sorted({k.lane_mbps for k in slow.links if k.kind == "net"}) == [10_000, 25_000]
    assert sum(k.lane_mbps == 10_000 for k in slow.links) == 2
    half = bench.half_bundle(1)
    assert sum(k.lanes for k in half.links) == sum(k.lanes for k in bench.boxes("mi250")(1).links) - 4


def test_rows_stop_and_larger_ones_are_not_tried(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "row_of", lambda *_: {"failed": "stopped after 1 s"})
    args = argparse.Namespace(families=["A100"], collectives=["allgather"], max_gpus=32, max_seconds=1.0)
    assert [row["failed"].split()[0] for row in bench.rows(args)] == ["stopped", "not", "not"]
    assert "stopped" in bench.line_of(next(bench.rows(args)))


@pytest.mark.slow
def test_a_process_that_takes_too_long_or_fails_is_told(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "START_SECONDS", 0.01)
    assert bench.row_of("DGX-1P", 1, "broadcast", 0.0) == {"failed": "stopped after 0 s"}
    monkeypatch.setattr(bench, "START_SECONDS", 60)
    assert "KeyError" in bench.row_of("nothing", 1, "broadcast", 0.0)["failed"]


@pytest.mark.slow
def test_the_file_and_the_picture(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")
    file = tmp_path / "treegen.json"
    flags = ["--families", "DGX-1P", "random", "--collectives", "allgather", "--max-gpus", "8", "-o", str(file)]
    assert bench.main(flags) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert (found["format"], [row["gpus"] for row in found["rows"]]) == ("blinkmpi.treegen", [8, 8])
    assert all(row["optimal"] and row["peak_bytes"] > 0 for row in found["rows"])
    assert capsys.readouterr().out.count("GPUs allgather") == 2
    svg = (tmp_path / "treegen.svg").read_text()
    for word in ("allgather", "DGX-1P", "ForestColl", "seconds to plan"):
        assert word in svg
    assert bench.main(["--plot", "-o", str(file)]) == 0
    assert (tmp_path / "treegen.svg").read_text() == svg
