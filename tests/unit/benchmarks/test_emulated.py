"""The driver that measures emulated machines, without GPUs, and NCCL's graphs as algorithms."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.lang import nccl_graphs
from blinkmpi.errors import FormatError
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology.importers import on_gpus_of, parse_gpus
from blinkmpi.topology.nccl import read_xml, write_xml
from tests.harness import ROOT
from tests.unit.benchmarks.scripts import script

REAL = ROOT / "tests" / "data" / "nccl-topo-h200x8.xml"
LOG = (ROOT / "tests" / "data" / "nccl-log-emulated.txt").read_text()
PACED = {"rings": 30.0, "trees": 40.5}  # GB/s


@pytest.fixture
def emulated() -> Any:
    return script("emulated")


def test_every_set_is_planned_and_told_to_nccl(emulated: Any) -> None:
    found = read_xml(REAL.read_text())
    named = tuple(replace(d, name="NVIDIA H200") for d in found.devices)  # as the probe names them
    real = replace(found, devices=named)
    for gpus in emulated.SETS:
        part = emulated.emulated_part(gpus)
        assert part.n == len(parse_gpus(gpus))
        units = {k.lane_mbps for k in part.links if k.kind == "nvlink"}
        pcie = gpus == "0,5"  # those two have no NVLink
        assert units == (set() if pcie else {emulated.UNIT_MBPS})
        plan = make_plan(part, gpus="slots", collectives=("allreduce",))
        packing = plan.packing("allreduce", 0, plan.rule("allreduce", 1 << 28).scheme)
        assert packing.rate >= (15_000 if pcie else 45_000)
        back = read_xml(write_xml(on_gpus_of(part, real)))
        lanes = [sorted((k.src, k.dst, k.lanes) for k in t.links if k.kind == "nvlink") for t in (part, back)]
        assert lanes[0] == lanes[1]
        assert [d.bus for d in back.devices] == [d.bus for d in real.devices[: part.n]]


def test_what_nccl_made_of_its_file_is_read_from_its_log(emulated: Any) -> None:
    made = emulated.made_of([LOG])
    assert made["file_read"]
    assert made["patterns"] == [
        {"pattern": "ring", "channels": 3, "GBps": 22.5, "path": "PHB/PIX"},
        {"pattern": "balanced tree", "channels": 3, "GBps": 22.5, "path": "NVL/PIX"},
    ]
    assert made["rings"] == ["0 2 1 3", "0 3 1 2"]
    assert made["coll_channels"] == 6
    assert made["connections"] == {"P2P": 1, "SHM": 2}
    assert emulated.made_of([]) == {
        "file_read": False, "patterns": [], "rings": [], "coll_channels": None, "connections": {},
    }  # fmt: skip


# Each rank prints its own line, of the same two channels.
TREES = """
host:1:1 [0] NCCL INFO Trees [0] 2/-1/-1->0->-1 [1] 3/-1/-1->0->-1
host:2:2 [1] NCCL INFO Trees [0] 3/-1/-1->1->2 [1] -1/-1/-1->1->2
host:3:3 [2] NCCL INFO Trees [0] 1/-1/-1->2->0 [1] 1/-1/-1->2->3
host:4:4 [3] NCCL INFO Trees [0] -1/-1/-1->3->1 [1] 2/-1/-1->3->0
"""


def test_rings_and_trees_of_nccl_are_algorithms(emulated: Any) -> None:
    graphs = nccl_graphs.read_graphs(LOG + TREES, 4)
    assert graphs == (([0, 2, 1, 3], [0, 3, 1, 2]), ([-1, 2, 0, 1], [-1, 2, 3, 0]))
    part = emulated.emulated_part("1,4,5,6")
    inputs = [np.arange(64, dtype=np.int64) * (rank + 1) for rank in range(4)]
    for kind, found in graphs._asdict().items():
        made = emulated.PACED[kind](4, found)
        for chunks in made.interpret(inputs):
            np.testing.assert_array_equal(np.concatenate(chunks), sum(inputs))
        assert 0 < made.simulate(part, 1 << 28).algbw <= 90.0, "the bound of this part"


def test_graphs_that_were_kept_are_those_of_the_set(emulated: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for n, gpus in ((3, "0,1,4"), (3, "0,3,4"), (4, "1,4,5,6"), (4, "0-3")):  # training on emulated links takes them
        part, found = emulated.emulated_part(gpus), emulated.kept_graphs(gpus, n)
        assert max(emulated.PACED[kind](n, found[kind]).simulate(part, 1 << 28).algbw for kind in found) > 40
    assert emulated.kept_graphs("0,1,2,3", 4) == emulated.kept_graphs("0-3", 4)
    row = {"gpus": "0,1,4", "nccl": None}
    other = {"gpus": "0,3,4", "nccl": {"graphs": {"rings": [[0, 1, 2]], "trees": [[-1, 0, 1]]}}}
    (tmp_path / "emulated-dgx-1v-np3.json").write_text(json.dumps({"results": [row, other]}))
    monkeypatch.setattr(emulated, "RESULTS", tmp_path)
    assert emulated.kept_graphs("0,3,4", 3) == other["nccl"]["graphs"]  # type: ignore[index]
    for gpus, n in (("0,1,4", 3), ("1,4,5", 3), ("0-4", 5)):
        with pytest.raises(FormatError, match=rf"np{n}.json has no .* for GPUs {gpus}; keep .* {n} --sets {gpus}"):
            emulated.kept_graphs(gpus, n)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "no ring"),
        (LOG, "no tree"),
        (LOG.replace("0 2 1 3", "0 2 2 3") + TREES, "channel 0 has the ring"),
        (LOG + TREES.replace("1->2->3", "1->2->1"), "channel 1 has"),
        (LOG + TREES.replace("->3->1", "->3->-1"), "channel 0 has"),
    ],
)
def test_a_log_without_whole_graphs_is_refused(log: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        nccl_graphs.read_graphs(log, 4)


def test_all_jobs_of_a_run_and_its_file(
    emulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def run(argv: list[str], settings: dict[str, str], seconds: float) -> str:
        args = emulated.arguments(argv[argv.index("--rank") :])
        jobs.append((args.np, args.rank, args.sets))
        if args.sets == ["0-3"] and args.rank == "nccl":
            return "exit status 1\nno NCCL here"
        if args.rank in PACED:
            assert set(json.loads((args.out / "graphs.json").read_text())) == set(PACED)
        (args.out / "topology.xml").write_text("<system/>")
        rate = {"planned_GBps": 90.0, "bound_GBps": 90.0, "trees": 2, "how": {"scheme": "trees"}}
        rates = {"ours": 81.0, "nccl": 27.0, **PACED}
        row = {"us": 3000.0, "GBps": rates[args.rank], "wrong": 0, "spread_us": [1, 2, 3]}
        rows = [{**row, **(rate if args.rank == "ours" else {})} for _ in range(2)]
        found = {"rows": rows, "gpu": {"name": "NVIDIA H200"}, "versions": {"python": "3"}, "env": []}
        (args.out / f"{args.rank}.json").write_text(json.dumps({**found, "nccl_version": "2.28.9"}))
        if args.rank == "nccl":
            assert settings["NCCL_TOPO_FILE"] == str(args.out / "topology.xml")
            (args.out / "log.1").write_text(LOG + (TREES if args.np == [4] else ""))
        return ""

    monkeypatch.setattr(emulated, "run", run)
    assert emulated.main(["4", "2", "--out", str(tmp_path)]) == 1
    assert jobs == [
        *(([4], library, ["1,4,5,6"]) for library in ("ours", "nccl", "rings", "trees")),
        *(
            ([n], library, [gpus])
            for n, gpus in ((4, "0-3"), (2, "0,3"), (2, "0,1"), (2, "0,5"))
            for library in ("ours", "nccl")
        ),
    ]
    said = capsys.readouterr().out
    assert "1,4,5,6        256   90.0   90.0   81.0  0.90   27.0   3.00   40.5   2.00     0" in said
    assert "0-3, nccl: exit status 1" in said
    assert "0-3, trees: not started: the job before it has left no graphs.json" in said
    assert "0,3, nccl's graphs: NCCL's log has no tree" in said
    file = tmp_path / "emulated-dgx-1v-np4.json"
    document = json.loads(file.read_text())
    assert document["emulated"] is True
    assert [(row["gpus"], row["size"] >> 20) for row in document["results"]] == [
        ("1,4,5,6", 256), ("1,4,5,6", 1024), ("0-3", 256), ("0-3", 1024),
    ]  # fmt: skip
    assert emulated.main(["2", "--out", str(tmp_path / "two"), "--without-nccl"]) == 0
    page = script("report")
    text = page.render(page.read(tmp_path))
    graphs = "3 x ring PHB/PIX, 3 x balanced tree NVL/PIX"
    rates = "90.0 | 90.0 | 81.0 | 0.90 | 27.0 | 3.00 | 30.0 | 40.5 | 2.00"
    assert f"| 1,4,5,6 | 256 MiB | {rates} | {graphs} | 0 |" in text
    assert "| 0-3 | 1 GiB | 90.0 | 90.0 | 81.0 | 0.90 | - | - | - | - | - | - | 0 |" in text
    assert "- failed: 0-3, nccl: exit status 1" in text
    assert "- GPUs: 4 x NVIDIA H200" in text


def test_a_job_that_fails_says_why(emulated: Any) -> None:
    fails = [sys.executable, "-c", "print('the reason'); print('---\\nMPI_ABORT was invoked'); raise SystemExit(3)"]
    assert emulated.run(fails, {}, 30) == "exit status 3\nthe reason"
    sleeps = ["sh", "-c", "echo begun; exec sleep 60"]
    assert emulated.run(sleeps, {}, 1.5) == "no end after 2 s\nbegun"
    says = [sys.executable, "-c", "import os, sys; sys.exit(os.environ['NCCL_P2P_LEVEL'] != 'NVL')"]
    assert emulated.run(says, emulated.NCCL_SETTINGS, 30) == ""
