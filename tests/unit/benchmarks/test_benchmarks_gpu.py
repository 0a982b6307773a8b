"""The drivers of the GPU measurements, without GPUs: what they start, read, print and write."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.bench.options import read, settle
from blinkmpi.cli import main as cli
from blinkmpi.planning.selection import make_plan
from blinkmpi.topology.importers import on_gpus_of, parse_gpus
from blinkmpi.topology.nccl import read_xml, write_xml
from tests.harness import ROOT
from tests.unit.benchmarks.scripts import needs, script

pytestmark = [needs("gpu"), needs("emulated")]


@pytest.fixture
def gpu() -> ModuleType:
    return script("gpu")


def test_every_step_is_a_command_that_ranks_with_gpus_take(gpu: Any) -> None:
    found = gpu.steps(8, "1G")
    assert len({step.name for step in found}) == len(found)
    for step in found:
        args = cli._parser(with_bench=True).parse_args(["bench", *step.words.split()])
        options = read(args, 8)
        assert settle(args, options, gpu=True) == "gpu"
        if step.writes:
            assert (options.sizes[0], options.sizes[-1], len(options.sizes)) == (1 << 10, 1 << 30, 11)
            assert "nccl" in options.peers
    words = gpu.command(4, ["all_reduce"])
    assert words[:6] == ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "4"]
    assert words[-3:] == ["blinkmpi", "bench", "all_reduce"]


def test_the_time_is_shared_and_never_exceeded(gpu: Any) -> None:
    shares = [step.share for step in gpu.steps(8, "1G")]
    assert gpu.limits(shares, 480) < 480 / 10
    assert gpu.limits([2.0], 30) == 30
    left = 480.0
    for i in range(len(shares)):  # every step takes all that it may
        left -= gpu.limits(shares[i:], left)
    assert left >= 0


def result() -> dict[str, Any]:
    places = {
        place: {"compare": {"nccl": {"time": 40.0, "ratio": 4.0, "nwrong": 1}, "symm_mem": None}}
        for place in ("out_of_place", "in_place")
    }
    timed = {"time": 10.0, "nwrong": 0}
    row = {"size": 1 << 20, "out_of_place": timed, "in_place": timed}
    own = {"protocol": "packets", "ctas": 16, **places}
    return {"results": [{**row, "blinkmpi": own}], "blinkmpi": {"compare": ["nccl", "symm_mem"]}}


def test_the_table_has_every_row_and_is_cut_at_its_length(gpu: Any) -> None:
    text = gpu.table([("all_reduce-gpu-np8", result())])
    assert text.startswith("all_reduce-gpu-np8: ours us, nccl us, ratio, symm_mem us, ratio")
    assert text.splitlines()[1].split() == ["1M", "packets", "16", *["10.0", "40.0", "4.00", "N/A"] * 2, "2"]
    cut = gpu.table([(f"file{i}", result()) for i in range(200)])
    assert len(cut) < gpu.TABLE_CHARACTERS + 100
    assert cut.endswith("the rest is in the files")
    assert gpu.table([]) == ""


def test_a_failing_step_is_named_and_the_next_goes_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(step: Any, n: int, out: Path, seconds: float) -> tuple[str, str]:
        ran.append(step.name)
        if "reduce_scatter" in step.name:
            return "exit status 2", "some words\nthe last word"
        if step.writes:
            (out / f"{step.name}.json").write_text(json.dumps(result()))
        return "ok", ""

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "out"
    assert gpu.main(["2", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert ran == [step.name for step in gpu.steps(2, "1G")]
    assert "reduce_scatter-gpu-np2: exit status 2" in said
    assert "the last word" in said
    failed = [name for name in ran if "reduce_scatter" in name and not name.startswith("sanity")]
    assert {"reduce_scatter-gpu-np2", "reduce_scatter-bfloat16-gpu-graph-np2"} < set(failed)
    assert said.rstrip().endswith("\n".join(f"{name}: exit status 2" for name in failed))
    assert "the last word" in (out / "gpu-np2.log").read_text()
    with pytest.raises(SystemExit):
        gpu.main(["2", "--out", str(out)])
    assert "earlier run" in capsys.readouterr().err
    assert gpu.main(["2", "--out", str(tmp_path / "two"), "--only", "broadcast-gpu"]) == 0
    assert gpu.main(["2", "--out", str(tmp_path / "three"), "--budget", "5", "--only", "broadcast-gpu"]) == 1
    assert "not started" in capsys.readouterr().out


def test_a_step_that_does_not_end_is_ended(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = gpu.Step("x", "", 1)
    sleeps = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    monkeypatch.setattr(gpu, "command", lambda n, words: sleeps)
    assert gpu.run(step, 2, tmp_path, 1.5) == ("no end after 2 s", "begun\n")
    monkeypatch.setattr(gpu, "command", lambda n, words: [sys.executable, "-c", f"print({words!r})"])
    assert gpu.run(step, 2, tmp_path, 30) == ("ok", f"{['-J', str(tmp_path / 'x.json')]}\n")


# ---------------------------------------------------------------- emulated machines


REAL = ROOT / "tests" / "data" / "nccl-topo-h200x8.xml"
LOG = (ROOT / "tests" / "data" / "nccl-log-emulated.txt").read_text()


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
        assert {k.lane_mbps for k in part.links if k.kind == "nvlink"} == {emulated.UNIT_MBPS}
        plan = make_plan(part, gpus="slots", collectives=("allreduce",))
        packing = plan.packing("allreduce", 0, plan.rule("allreduce", 1 << 28).scheme)
        assert packing.rate >= 45_000
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


def test_all_jobs_of_a_run_and_its_file(
    emulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def run(argv: list[str], settings: dict[str, str], seconds: float) -> str:
        args = emulated.arguments(argv[argv.index("--rank") :])
        jobs.append((args.np, args.rank, args.sets))
        if args.sets == ["0-3"] and args.rank == "nccl":
            return "exit status 1\nno NCCL here"
        (args.out / "topology.xml").write_text("<system/>")
        rate = {"planned_GBps": 90.0, "bound_GBps": 90.0, "trees": 2, "how": {"scheme": "trees"}}
        row = {"us": 3000.0, "GBps": 81.0 if args.rank == "ours" else 27.0, "wrong": 0, "spread_us": [1, 2, 3]}
        rows = [{**row, **(rate if args.rank == "ours" else {})} for _ in range(2)]
        found = {"rows": rows, "gpu": {"name": "NVIDIA H200"}, "versions": {"python": "3"}, "env": []}
        (args.out / f"{args.rank}.json").write_text(json.dumps({**found, "nccl_version": "2.28.9"}))
        if args.rank == "nccl":
            assert settings["NCCL_TOPO_FILE"] == str(args.out / "topology.xml")
            (args.out / "log.1").write_text(LOG)
        return ""

    monkeypatch.setattr(emulated, "run", run)
    assert emulated.main(["4", "2", "--out", str(tmp_path)]) == 1
    assert jobs == [
        ([n], library, [gpus])
        for n, gpus in ((4, "1,4,5,6"), (4, "0-3"), (2, "0,3"))
        for library in ("ours", "nccl")
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "1,4,5,6        256   90.0   90.0   81.0  0.90   27.0   3.00     0" in said
    assert "0-3, nccl: exit status 1" in said
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
    assert f"| 1,4,5,6 | 256 MiB | 90.0 | 90.0 | 81.0 | 0.90 | 27.0 | 3.00 | {graphs} | 0 |" in text
    assert "| 0-3 | 1 GiB | 90.0 | 90.0 | 81.0 | 0.90 | - | - | - | 0 |" in text
    assert "- failed: 0-3, nccl: exit status 1" in text
    assert "- GPUs: 4 x NVIDIA H200" in text


def test_a_job_that_fails_says_why(emulated: Any) -> None:
    fails = [sys.executable, "-c", "print('the reason'); print('---\\nMPI_ABORT was invoked'); raise SystemExit(3)"]
    assert emulated.run(fails, {}, 30) == "exit status 3\nthe reason"
    sleeps = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert emulated.run(sleeps, {}, 1.5) == "no end after 2 s\nbegun"
    says = [sys.executable, "-c", "import os, sys; sys.exit(os.environ['NCCL_P2P_LEVEL'] != 'NVL')"]
    assert emulated.run(says, emulated.NCCL_SETTINGS, 30) == ""
