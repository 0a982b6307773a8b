"""The paper's figures: each figure can be made anew, and says what is simulated."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import chunks, dgx2, hybrid, servers, simulated, speedup, throughput, trees
from blinkmpi.topology.machines import machine
from tests.harness import ROOT

KIB = 1 << 10
NAMES = ("speedup", "throughput", "trees", "chunks", "hybrid", "dgx-2", "servers")
EXACT = ("speedup", "trees")


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((paper.RESULTS / f"paper-{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_result_says_what_it_is(name: str) -> None:
    assert list(paper.FIGURES) == list(NAMES)
    found = stored(name)
    assert (found["format"], found["simulated"]) == (f"blinkmpi.paper-{name}", name not in EXACT)
    assert len(found["commit"]) == 40
    assert found["date"].startswith("20")
    assert {"python", "blinkmpi", "numpy", "scipy"} <= set(found["versions"])
    pictures = [p.name for p in paper.RESULTS.glob(f"paper-{name}*.svg")]
    assert pictures
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert all(picture in page for picture in pictures)


def test_the_sets_are_those_that_the_paper_counts() -> None:
    assert [len(list(simulated.sets_of(name))) for name in simulated.DGX_1] == [46, 14]
    for name, count in (("dgx-1v", 46), ("dgx-1p", 14)):
        assert stored("speedup")["machines"][name]["from_3"]["unique"] == count
        for figure in ("throughput", "trees"):
            assert sum(row["machine"] == name for row in stored(figure)["rows"]) == count


def test_trees_gain_most_where_no_ring_joins_a_set_and_nothing_on_the_whole_machine() -> None:
    for report in stored("speedup")["machines"].values():
        rows = report["subsets"]
        assert max(rows, key=lambda row: row["speedup"]["allreduce"])["rings"] == 0
        assert set(rows[-1]["speedup"].values()) == {1}
        assert len(rows[-1]["gpus"]) == 8


def test_simulated_rates_do_not_exceed_what_the_links_allow() -> None:
    for row in stored("throughput")["rows"]:
        for cell in (row["broadcast"], row["allreduce"]):
            assert 0.9 * cell["trees_rate_gbps"] < cell["trees_gbps"] <= cell["trees_rate_gbps"] * 1.0001
            assert cell["rings_gbps"] <= cell["rings_rate_gbps"] * 1.0001
    for row in stored("servers")["rows"]:
        assert row["gbps"] <= row["rate_gbps"] * 1.0001 <= row["bound_gbps"] * 1.0002
    for row in stored("hybrid")["rows"]:
        assert row["nvlink"]["rate_gbps"] < row["hybrid"]["rate_gbps"]
        assert row["switched_rate_gbps"] <= row["hybrid"]["rate_gbps"]


def test_the_integer_program_leaves_six_trees_on_a_dgx_1v_as_in_the_paper() -> None:
    (whole,) = (row for row in stored("trees")["rows"] if row["machine"] == "dgx-1v" and len(row["gpus"]) == 8)
    assert whole["mwu+ilp"]["trees"] == 6 < whole["mwu"]["trees"]
    assert (whole["fewest"]["trees"], whole["fewest"]["proved"]) == (4, True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure in a second."""
    monkeypatch.setattr(speedup, "DGX_1", ("dgx-1p",))
    sets = [some for some in simulated.sets_of("dgx-1p") if len(some[1]) == 3]
    for figure in (throughput, trees):
        monkeypatch.setattr(figure, "sets_of", lambda _: sets)
    monkeypatch.setattr(throughput, "NBYTES", 256 * KIB)
    monkeypatch.setattr(trees, "EPSILONS", trees.EPSILONS[:1])
    monkeypatch.setattr(chunks, "CASES", (("broadcast", (0, 1, 2), 256 * KIB), ("allreduce", (0, 1), 64 * KIB)))
    monkeypatch.setattr(hybrid, "SIZES", (3,))
    monkeypatch.setattr(hybrid, "NBYTES", 256 * KIB)
    monkeypatch.setattr(dgx2, "SIZES", (1 * KIB, 4 * KIB))
    monkeypatch.setattr(servers, "GBITS", (100,))
    monkeypatch.setattr(servers, "NBYTES", 256 * KIB)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_can_be_made_anew(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")
    assert paper.main([name, "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")
    found = json.loads((tmp_path / f"paper-{name}.json").read_text())
    pictures = {p: p.read_text() for p in tmp_path.glob("*.svg")}
    assert pictures
    assert all(("simulated" in svg) == found["simulated"] for svg in pictures.values())
    assert paper.main([name, "-o", str(tmp_path), "--plot"]) == 0
    assert {p: p.read_text() for p in tmp_path.glob("*.svg")} == pictures, "equal results are equal pictures"
    assert json.loads((tmp_path / f"paper-{name}.json").read_text()) == found
    table = "".join(paper.FIGURES[name].tables(found).values())
    assert table.count("\n") >= 3


def test_each_server_has_one_card_of_the_rate() -> None:
    for gbits in servers.GBITS:
        part = servers.two_servers(gbits)
        assert part.n == len(servers.GPUS)
        cards = [k.mbps for k in part.links if k.kind == "net"]
        assert cards == [gbits * 125] * 4, "two cards, both ways"


def test_the_search_for_a_chunk_ends_at_the_best_that_it_tried() -> None:
    for row in stored("chunks")["rows"]:
        assert row["chunk"] in [p["chunk"] for p in row["tried"]]
        assert row["gbps"] >= 0.97 * max(p["gbps"] for p in row["tried"])
        assert [p["chunk"] for p in row["tried"]][:2] == [chunks.LOWEST, 2 * chunks.LOWEST]


def test_rings_go_over_pcie_where_nvlinks_form_none() -> None:
    whole = machine("dgx-1v").only(["nvlink"])
    chain, ring = (simulated.nccl_rings(whole.subset(gpus), "allreduce") for gpus in ((0, 1, 4), (0, 1, 2)))
    assert (chain.links, chain.gbps, chain.seconds(7_500_000)) == ("PCIe", 7.5, pytest.approx(1e-3))
    assert (ring.links, ring.gbps) == ("NVLink", 37.5)
    assert ring.seconds(1 << 20) > (1 << 20) / 37.5e9
