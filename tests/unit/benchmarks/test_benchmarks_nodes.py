"""The measurements on virtual nodes of GPUs, without GPUs: what is started, read from NCCL's log, written and shown."""

import json
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.bench.options import memory_for, read
from blinkmpi.cli import main as cli
from tests.harness import ROOT
from tests.unit.benchmarks.scripts import script

LOG = (ROOT / "tests" / "data" / "nccl-log-nodes.txt").read_text()


@pytest.fixture
def nodes() -> Any:
    return script("nodes")


def contexts(words: list[str]) -> list[list[str]]:
    """The parts of a command line between colons."""
    return [list(part) for colon, part in groupby(words, lambda word: word == ":") if not colon]


def test_each_node_has_a_context_with_its_own_name(nodes: Any, tmp_path: Path) -> None:
    for n, splits in nodes.SPLITS.items():
        for split in splits:
            assert sum(split) == n
            parts = contexts(nodes.command(split, "256M", tmp_path / "x.json"))
            assert parts[0][: len(nodes.LAUNCHER)] == list(nodes.LAUNCHER)
            parts[0] = parts[0][len(nodes.LAUNCHER) :]
            heads = [part[: part.index(sys.executable)] for part in parts]
            assert heads == [["-np", str(k), "-x", f"NCCL_HOSTID=node{i}"] for i, k in enumerate(split)]
            (bench,) = {tuple(part[part.index(sys.executable) :]) for part in parts}
            args = cli.parsed(bench[3:])
            options = read(args, n)
            assert memory_for(args, options, gpu=True) == "gpu"
            assert [size >> 20 for size in options.sizes] == [1, 4, 16, 64, 256]
            assert (options.peers, options.timing.replays, args.persistent) == (("nccl",), 0, False)
            variables = nodes.settings(split, tmp_path)
            assert variables["BLINKMPI_NODES"] == "+".join(map(str, split))
            assert variables["NCCL_NVLS_ENABLE"] == "0"
            assert (variables["NCCL_NET"], variables["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
    launcher = " ".join(nodes.LAUNCHER)
    assert "--mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include lo" in launcher


@pytest.mark.mpi_skip
@pytest.mark.skipif(not (Path(sys.prefix) / "bin" / "mpirun").exists(), reason="no mpirun in this environment")
def test_mpirun_gives_each_node_its_name(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = subprocess.run([Path(sys.prefix) / "bin" / "mpirun", "--version"], capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        pytest.skip("the command line is for Open MPI")
    monkeypatch.setenv("PATH", str(Path(sys.prefix) / "bin"), prepend=":")
    program = "import os; e = os.environ; print(*(e[k] for k in ('NCCL_HOSTID', 'BLINKMPI_NODES', 'OMPI_MCA_btl')))"
    words: list[str] = []
    for part in contexts(nodes.command((1, 2), "1M", tmp_path / "x.json")):
        at = part.index(sys.executable)
        words += [*([":"] if words else []), *part[:at], shutil.which("python3") or sys.executable, "-c", program]
    why, said = nodes.run_job(words, nodes.settings((1, 2), tmp_path), 60)
    assert why == "", said
    assert sorted(said.split("\n")) == ["", "node0 1+2 self,tcp", "node1 1+2 self,tcp", "node1 1+2 self,tcp"]


def test_what_nccl_made_of_the_nodes_is_read_from_its_log(nodes: Any) -> None:
    assert nodes.made_of([LOG, LOG]) == {"nodes": [2], "connections": {"NET/Socket": 2, "P2P": 4}}
    assert nodes.made_of([]) == {"nodes": [], "connections": {}}


def result(n: int, memory: str = "gpu") -> dict[str, Any]:
    """What ``blinkmpi bench`` writes, as far as it is read here."""
    row: dict[str, Any] = {"size": 1 << 20, "type": "float", "redop": "sum", "root": -1}
    row["blinkmpi"] = {"scheme": "cluster", "protocol": "slots", "ctas": 16, "predicted_us": 900.0, "bound_us": 800.0}
    for place in ("out_of_place", "in_place"):
        row[place] = {"time": 1000.0, "alg_bw": 1.05, "bus_bw": 1.57, "nwrong": 0}
        row["blinkmpi"][place] = {"compare": {"nccl": {"time": 1500.0, "ratio": 1.5, "nwrong": 0}}}
    ours = {"ranks": n, "collective": "allreduce", "compare": ["nccl"], "memory": memory, "gpu": {"name": "H200"}}
    return {"config": {}, "results": [row], "blinkmpi": ours}


def test_every_split_has_a_file_and_a_table(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        ran.append((variables["BLINKMPI_NODES"], seconds <= 90 / (2 - len(ran))))
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(result(4)))
        Path(variables["NCCL_DEBUG_FILE"]).parent.joinpath("log.h.1").write_text(LOG)
        return "", ""

    monkeypatch.setattr(nodes, "run_job", run)
    assert nodes.main(["4", "--out", str(tmp_path)]) == 0
    assert ran == [("2+2", True), ("1+3", True)]
    said = capsys.readouterr().out
    assert "virtual nodes of 1+3 GPUs; NCCL saw 2 nodes, connections: 1 NET/Socket, 2 P2P" in said
    row = next(line for line in said.splitlines() if line.startswith("   1 "))
    assert row.split() == ["1", *["1.00", "1.05", "1.50", "1.50"] * 2, "0.90", "0.80", "0"]
    document = json.loads((tmp_path / "nodes-gpu-2-2.json").read_text())
    assert document["nodes"]["virtual"] is True
    assert document["nodes"]["ranks"] == [2, 2]

    made: Any = script("report")
    page = made.render(made.read(tmp_path))
    assert "## GPUs on virtual nodes" in page
    assert "### nodes-gpu-2-2.json\n\n- virtual nodes: 2+2 GPUs; NCCL saw 2 nodes, its connections are 1 NET" in page
    assert "| 1 MiB | float | sum | cluster | slots | 16 | 1000 | 1.6 | 1500 | 1.50 |" in page
    assert "\n## GPUs\n" not in page, "these files have a section of their own"


def test_a_split_by_an_mpi_that_takes_gpu_memory_is_marked_and_compared_with_one_node(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        ran.append((variables["BLINKMPI_NODES"], variables.get("BLINKMPI_CUDA_AWARE"), variables.get("OMPI_MCA_pml")))
        made = result(4)
        for place in ("out_of_place", "in_place"):
            made["results"][0][place]["time"] = 1000.0 if variables["BLINKMPI_NODES"] else 250.0
            if "--compare" not in argv:
                del made["results"][0]["blinkmpi"][place]
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(made))
        Path(variables["NCCL_DEBUG_FILE"]).parent.joinpath("log.h.1").write_text(LOG)
        return "", ""

    monkeypatch.setattr(nodes, "run_job", run)
    monkeypatch.setattr(
        nodes.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[f"/{name}"])
    )
    assert nodes.main(["4", "--aware", "--only", "2+2", "--out", str(tmp_path)]) == 0
    assert ran == [("2+2", None, None), ("2+2", "1", "ucx"), ("", "", "ucx")]
    assert "2+2 GPUs; ipc across the split, MPI takes GPU memory; beside ours on one node" in capsys.readouterr().out
    document = json.loads((tmp_path / "nodes-gpu-2-2-ipc.json").read_text())
    assert document["nodes"] == {"virtual": True, "ranks": [2, 2], "mark": "ipc across the split"}
    row = document["results"][0]
    assert row["blinkmpi"]["in_place"]["compare"] == {"one node": {"time": 250.0, "ratio": 0.25, "nwrong": 0}}
    assert nodes.aware_settings((2, 2), tmp_path)["LD_LIBRARY_PATH"].startswith("/libucx/lib")
    made: Any = script("report")
    page = made.render(made.read(tmp_path))
    assert "2+2 GPUs; ipc across the split: MPI maps" in page
    assert "| cluster | slots | 16 | 1000 | 1.6 | 250.0 | 0.25 |" in page
    monkeypatch.setattr(nodes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install libucx-cu13"):
        nodes.main(["4", "--aware", "--only", "2+2", "--out", str(tmp_path)])


def test_what_goes_wrong_is_told(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        if variables["BLINKMPI_NODES"] == "2+2":
            return "no end after 45 s", "1048576 a row that was measured"
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(result(4)))
        Path(variables["NCCL_DEBUG_FILE"]).parent.joinpath("log.h.1").write_text(LOG.replace("nNodes 2", "nNodes 1"))
        return "", ""

    monkeypatch.setattr(nodes, "run_job", run)
    assert nodes.main(["4", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "2+2: no end after 45 s" in said
    assert "a row that was measured" in said
    assert "1+3: NCCL saw [1] nodes, not 2" in said
    assert [path.name for path in tmp_path.glob("*")] == ["nodes-gpu-1-3.json"]
    assert nodes.main(["4", "--out", str(tmp_path), "--budget", "5"]) == 1
    assert "2+2: not started, 2 s left" in capsys.readouterr().out

    def host(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(result(2, "host")))
        return "", ""

    monkeypatch.setattr(nodes, "run_job", host)
    assert nodes.main(["2", "--out", str(tmp_path)]) == 1
    assert "1+1: the ranks had no GPUs" in capsys.readouterr().out


def test_a_job_that_does_not_end_is_ended(nodes: Any) -> None:
    sleeps = ["sh", "-c", "echo begun; exec sleep 60"]
    assert nodes.run_job(sleeps, {}, 1.5) == ("no end after 2 s", "begun\n")
    assert nodes.run_job([sys.executable, "-c", "raise SystemExit(3)"], {}, 30) == ("exit status 3", "")
