"""Sweeps: what is run, what is kept and run again, how a run can fail, and the pictures."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.bench.options import add_flags
from blinkmpi.bench.sweep import command as sweep
from blinkmpi.bench.sweep import plot_scaling as sweep_plot
from blinkmpi.bench.sweep.file import parse
from blinkmpi.bench.sweep.jobs import last_words, machines
from blinkmpi.bench.sweep.results import read, tables
from blinkmpi.cli import main as cli
from blinkmpi.errors import ArgumentError
from blinkmpi.util.launcher import RANK_VARIABLES
from tests.harness import PATIENCE_S
from tests.unit.bench.fake_srun import SRUN

OPEN_MPI = "Open MPI v5.0.11"
JOB = ("SLURM_", "PBS_", "LSB_", "BLINKMPI_", "NCCL_", "CUDA_", "PMI_", "OMPI_COMM_WORLD")


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(JOB) or name in RANK_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("BLINKMPI_GPU_DISABLE", "1")


# ---------------------------------------------------------------- running, with an srun that starts nothing


class Bench:
    """``blinkmpi bench --sweep`` in a folder of its own."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.file, self.results = folder, folder / "s.toml", folder / "r.json"
        self.file.write_text(f'launcher = "srun"\ncompare = "mpi"\n{text}')
        (folder / "srun").write_text(SRUN)
        (folder / "srun").chmod(0o755)

    def run(self, *words: str) -> int:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        args = parser.parse_args(["--sweep", str(self.file), "-J", str(self.results), *words])
        return sweep.run(args, library=OPEN_MPI)

    def mode(self, text: str) -> None:
        (self.folder / "mode").write_text(text)

    @property
    def calls(self) -> list[str]:
        """What was started since the last look."""
        path = self.folder / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda text="": Bench(tmp_path, text)


TWO = 'collectives = ["all_reduce", "broadcast"]\nranks_per_node = [1, 2]\n'


def test_a_sweep_is_one_file_and_is_not_run_twice(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(TWO)
    assert one.run() == 0
    out, err = capsys.readouterr()
    assert one.calls == ["all_reduce 1", "all_reduce 2", "broadcast 1", "broadcast 2"]
    assert "[4/4] broadcast, 1 x 2 ranks: " in err
    assert "busbw 4 GB/s at 1 KiB" in err
    assert "4 of 4 runs are good" in out
    assert re.search(r"1 +2 +4 KiB +direct +81.9 us +4 +2.00", out), out
    body = read(str(one.results))
    assert [run["status"] for run in body["runs"]] == ["ok"] * 4
    assert {"commit", "dirty", "date", "started", "hardware", "versions", "args", "env", "scheduler"} <= body.keys()
    assert body["versions"]["mpi"] == OPEN_MPI
    assert body["runs"][0]["result"]["blinkmpi"]["ranks"] == 1
    assert one.run() == 0
    assert one.calls == []
    assert "4 runs, 4 of them in" in capsys.readouterr().err
    one.file.write_text(one.file.read_text().replace("[1, 2]", "[1, 2, 3]"))
    assert one.run() == 0
    assert one.calls == ["all_reduce 3", "broadcast 3"]
    assert len(read(str(one.results))["runs"]) == 6
    assert sorted(p.name for p in one.folder.iterdir()) == ["r.json", "s.toml", "srun"]


def test_a_run_that_failed_is_kept_with_its_reason_and_tried_again(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make(TWO)
    one.mode("broadcast-1-fails")
    assert one.run() == 1
    (failed,) = [run for run in read(str(one.results))["runs"] if run["status"] == "failed"]
    assert failed["error"] == "exit status 2: blinkmpi: error: rank 1: no luck; try again"
    assert (failed["tries"], failed["result"], failed["key"]["ranks"]) == (1, None, 1)
    assert len(one.calls) == 4, "the others are run all the same"
    assert "failed: broadcast, 1 x 1 ranks, auto: exit status 2" in capsys.readouterr().out
    assert one.run() == 1
    assert one.calls == ["broadcast 1"]
    one.mode("")
    assert one.run() == 0
    again = read(str(one.results))["runs"]
    assert [(run["status"], run["tries"]) for run in again] == [("ok", 1), ("ok", 1), ("ok", 3), ("ok", 1)]


def test_a_run_that_does_not_end_is_ended(make: Any) -> None:
    one = make('timeout = 3\n[[part]]\n[[part]]\ncollectives = "reduce"\n')
    n = machines(parse("", source="x")[0], {}, OPEN_MPI).resources.slots
    one.mode(f"all_reduce-{n}-hangs")
    began = time.monotonic()
    one.run()
    assert time.monotonic() - began < 3 + PATIENCE_S
    first, _ = read(str(one.results))["runs"]
    assert first["error"] == "no end within 3 s"
    assert [run.split()[0] for run in one.calls] == ["all_reduce", "reduce"]


def test_worlds_of_one_are_no_result(make: Any) -> None:
    one = make("ranks_per_node = 2")
    one.mode("worlds")
    assert one.run() == 1
    (only,) = read(str(one.results))["runs"]
    assert "2 worlds of 1 ranks instead of one of 2: the launcher does not fit the MPI" in only["error"]
    assert sorted(p.name for p in one.folder.iterdir()) == ["calls", "mode", "r.json", "s.toml", "srun"]


# SIGTERM for the sweep as soon as its second run has begun, or not at all.
KILLER = """
import os, pathlib, signal, sys, time
calls, end = pathlib.Path(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    if calls.exists() and calls.read_text().count("\\n") == 2:
        os.kill(int(sys.argv[1]), signal.SIGTERM)
        break
    time.sleep(0.1)
"""


def test_a_scheduler_that_ends_the_job_loses_one_run(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(TWO)
    one.mode("all_reduce-2-hangs")
    words = (os.getpid(), one.folder / "calls", PATIENCE_S)
    killer = subprocess.Popen([sys.executable, "-c", KILLER, *map(str, words)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert one.run() == sweep.STOPPED
    finally:
        killer.wait(2 * PATIENCE_S)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [run["status"] for run in read(str(one.results))["runs"]] == ["ok"]
    assert "stopped: 1 of 4 runs are in" in capsys.readouterr().err
    assert one.calls == ["all_reduce 1", "all_reduce 2"]
    one.mode("")
    assert one.run() == 0
    assert len(one.calls) == 3


def test_dry_run_starts_nothing(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = make('nodes = ["1+1"]\nenv = { LEVEL = "a b" }\niters = 3\n')
    assert one.run("--dry-run") == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith("env 'LEVEL=a b' BLINKMPI_NODES=1+1 srun --mpi=pmix --ntasks=2 ")
    assert " -m blinkmpi bench all_reduce -b 1024 " in printed
    assert " -n 3 " in printed
    assert one.calls == []
    assert not one.results.exists()


def test_json_is_the_whole_file(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = make("ranks_per_node = 2")
    assert one.run("--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(one.results.read_text())


def test_what_does_not_go_with_a_sweep_is_refused(make: Any, tmp_path: Path) -> None:
    one = make()

    def refused(why: str, *words: str) -> None:
        with pytest.raises(ArgumentError, match=why):
            one.run(*words)

    refused("--minbytes 4 beside --sweep", "-b", "4")
    refused("the collective reduce beside --sweep", "reduce")
    one.results.write_text('{"results": []}')
    refused("holds no results of a sweep")
    one.results.write_text("{")
    refused("is no JSON")
    one.results = tmp_path / "none" / "r.json"
    refused("does not exist")
    one.results = one.file
    refused("is the sweep itself")
    one.file.unlink()
    refused("cannot read the sweep")
    (tmp_path / "srun").unlink()
    (one.folder / "t.toml").write_text('launcher = "srun"\n')
    one.file, one.results = one.folder / "t.toml", one.folder / "r2.json"
    os.environ["PATH"] = str(tmp_path)
    refused("cannot start 'srun'")


@pytest.mark.parametrize("job", [
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"PMI_SIZE": "4"},
    {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    {"PMIX_RANK": "0"},
])  # fmt: skip
def test_ranks_of_a_launcher_are_refused(job: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match=r"one process.*call it without one: blinkmpi bench --sweep f\.toml"):
        sweep.refuse_ranks(job, "f.toml")
    sweep.refuse_ranks({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, "f.toml")


def test_the_line_that_says_most_is_kept() -> None:
    frame = "-----\nprterun detected that one or more processes exited\n\n  Exit code:    1\n-----\n"
    assert last_words(f"x\nTraceback (most recent call last):\n  File\nValueError: bad\n{frame}") == "ValueError: bad"
    assert last_words(f"first\nlast\n{frame}") == "last"
    assert last_words(frame) == "it said nothing"


# ---------------------------------------------------------------- pictures


def swept(make: Any, text: str) -> dict[str, Any]:
    one = make(text)
    assert one.run() == 0
    return read(str(one.results))


def test_curves_run_over_ranks_or_nodes(make: Any) -> None:
    body = swept(make, "ranks_per_node = [1, 2, 4]")
    x, lines = sweep_plot.curves_of(body["runs"])
    assert x == "ranks"
    assert [(one.variant, one.size) for one in lines] == [
        (library, size) for size in (1024, 4096) for library in ("blinkmpi", "MPI")
    ]
    assert lines[0].points == ((1, 10.24, 8.0), (2, 20.48, 4.0), (4, 40.96, 2.0))
    assert lines[1].points[1] == (2, 40.96, 2.0)
    assert sweep_plot.chosen([8, 1, 4, 2], 3) == [1, 4, 8]
    for run, nodes in zip(body["runs"], (1, 2, 4), strict=True):
        run["key"]["nodes"] = nodes
    assert sweep_plot.curves_of(body["runs"])[0] == "nodes"


def test_schemes_on_one_number_of_ranks_have_no_curve(make: Any) -> None:
    body = swept(make, 'ranks_per_node = 2\nschemes = ["auto", "chain"]')
    assert sweep_plot.curves_of(body["runs"])[1] == []
    assert [name for name, _ in sweep_plot.documents([("r", body)])] == ["auto", "chain"]
    assert len(tables(body["runs"])) == 1


@pytest.mark.parametrize(("text", "words"), [
    ("ranks_per_node = [1, 2, 4]", ("against the number of ranks", "4 KiB", "MPI", "bus bandwidth", "time")),
    ('nodes = ["1", "1+1"]', ("against the number of nodes", "all_reduce float sum")),
    ('ranks_per_node = [1, 2]\nschemes = ["auto", "direct", "chain"]', ("4 KiB: bus bandwidth", "blinkmpi, chain")),
    ('ranks_per_node = 2\nschemes = ["auto", "chain"]', ("against size", "chain", "all_reduce float sum, 2 ranks")),
])  # fmt: skip
def test_a_sweep_is_drawn(make: Any, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")
    one = make(text)
    assert one.run() == 0
    picture = one.folder / "p.svg"
    assert cli.main(["plot", str(one.results), "-o", str(picture)]) == 0, capsys.readouterr().err
    drawn = " ".join(re.findall(r"<text[^>]*>([^<]*)<", picture.read_text()))
    for word in words:
        assert word in drawn
    one.results.write_text('{"format": "blinkmpi.sweep", "version": 2, "runs": []}')
    assert cli.main(["plot", str(one.results), "-o", str(picture)]) == 2
    one.results.write_text('{"format": "blinkmpi.sweep", "version": 9, "runs": []}')
    assert cli.main(["plot", str(one.results), "-o", str(picture)]) == 2
    assert "holds no results of a sweep" in capsys.readouterr().err
