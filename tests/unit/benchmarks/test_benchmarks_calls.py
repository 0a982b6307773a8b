"""The cost of calls and the ablations: what is started, measured, written and shown."""

import json
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkmpi.bench.options import read
from blinkmpi.cli import main as cli
from blinkmpi.runtime import inspection
from tests.unit.benchmarks.scripts import script


@pytest.fixture
def call_cost() -> ModuleType:
    return script("call_cost")


@pytest.fixture
def ablation() -> ModuleType:
    return script("call_cost")


# ---------------------------------------------------------------- the cost of a call


class OneRank:
    """The second of two ranks; the first is taken to send 1 everywhere, and to be as fast."""

    rank, size = 1, 2

    def __init__(self, *, right: bool = True) -> None:
        self.right, self.context = right, None
        self.lengths: list[int] = []

    def Allreduce(self, send: Any, receive: Any) -> None:
        self.lengths.append(send.size)
        np.copyto(receive, send + (1 if self.right else 2))

    def Barrier(self) -> None:
        pass

    def allgather(self, mine: Any) -> list[Any]:
        return [mine, [[2 * s for s in cycle] for cycle in mine]]

    def allgather_bytes(self, body: bytes) -> list[bytes]:
        return [body, body]

    def allreduce(self, mine: int, op: object) -> int:
        return mine


def test_tensors_have_different_lengths_and_results_are_checked(
    call_cost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "choice", lambda context, name, nbytes: {"scheme": "direct", "nbytes": nbytes})
    world, comm = OneRank(right=False), OneRank()
    row = call_cost.measured(world, SimpleNamespace(SUM=None), comm, 70)
    assert row["lengths"] == [64, 133]
    assert row["cycles"] == call_cost.cycles_of(70) >= 9
    assert comm.lengths == world.lengths == list(range(64, 134)) * (row["cycles"] + call_cost.WARMUP_CYCLES)
    assert row["ours"]["wrong"] == 0
    assert row["mpi"]["wrong"] == sum(range(64, 134)), "every element"
    assert row["ratio"] == row["mpi"]["us"] / row["ours"]["us"] > 0
    assert row["how"] == {"scheme": "direct", "nbytes": 256}


def test_a_cycle_takes_as_long_as_on_the_slowest_rank(call_cost: Any) -> None:
    (times,) = call_cost.seconds_of_cycles(OneRank(), [lambda: None], 3)
    assert len(times) == 3
    assert all(t > 0 for t in times)
    assert [call_cost.cycles_of(k) for k in (10, 1000, 10_000)] == [400, 9, 9]


def test_the_job_is_run_shown_and_written(
    call_cost: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = {"us": 4.0, "spread_us": [3.0, 4.0, 5.0], "wrong": 0}
    row = {"distinct": 10, "lengths": [64, 73], "cycles": 400, "ours": side, "mpi": {**side, "us": 2.0}, "ratio": 0.5}

    def run_job(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        assert argv[argv.index("-np") + 1] == "2"
        assert argv[argv.index("--distinct") + 1] == "10,64,65,160,1000"
        found = {"rows": [row], "versions": {"python": "3"}, "env": [], "machine": {"name": "cpu"}}
        Path(argv[-1]).write_text(json.dumps(found))
        return "", ""

    monkeypatch.setattr(call_cost, "run_job", run_job)
    path = tmp_path / "x.json"
    assert call_cost.main(["-o", str(path)]) == 0
    assert "      10      4.00       2.00   0.50      0" in capsys.readouterr().out
    made = json.loads(path.read_text())
    assert made["results"] == [row]
    assert {"commit", "dirty", "date", "hardware", "versions", "machine", "ranks"} <= made["blinkmpi"].keys()
    page = script("report").render([("call-cost-np2.json", made)])
    assert "| 10 | 64-73 | 4.0 | 2.0 | 0.50 | 0 |" in page
    monkeypatch.setattr(call_cost, "run_job", lambda *_: ("exit status 1", "a reason"))
    assert call_cost.main([]) == 2
    assert "a reason" in capsys.readouterr().err


# ---------------------------------------------------------------- ablations


def benched(us: float) -> dict[str, Any]:
    row = {"size": 1 << 16, **{place: {"time": us, "nwrong": 0} for place in ("out_of_place", "in_place")}}
    return {"results": [row], "blinkmpi": {"versions": {"python": "3"}, "machine": {"name": "cpu"}}}


def test_values_may_hold_commas_where_semicolons_separate(ablation: Any) -> None:
    assert ablation.values_of("on,off") == ["on", "off"]
    assert ablation.values_of(",style") == ["", "style"]
    assert ablation.values_of(";style,helper") == ["", "style,helper"]


def test_jobs_are_those_that_bench_takes(ablation: Any, tmp_path: Path) -> None:
    words = ablation.command(2, "broadcast", "64K:16M:4", 20, tmp_path / "x.json")
    assert words[words.index("-np") + 1] == "2"
    args = cli.parsed(words[words.index("bench") :])
    assert [size >> 10 for size in read(args, 2).sizes] == [64, 256, 1024, 4096, 16384]
    assert args.output_file == str(tmp_path / "x.json")


def test_values_take_turns_and_the_median_counts(
    ablation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str | None] = []
    times = {None: iter([10.0, 12.0, 50.0]), "off": iter([30.0, 24.0, 20.0])}

    def run_job(argv: list[str], variables: dict[str, str], seconds: float) -> tuple[str, str]:
        value = variables.get("SOME_VARIABLE")
        started.append(value)
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(benched(next(times[value]))))
        return "", ""

    monkeypatch.setattr(ablation, "run_job", run_job)
    words = ["--variable", "SOME_VARIABLE", "--values", ",off", "--collectives", "all_reduce", "--rounds", "3"]
    assert ablation.main([*words, "-o", str(tmp_path / "x.json")]) == 0
    assert started == [None, "off"] * 3
    made = json.loads((tmp_path / "x.json").read_text())
    assert made["results"][0]["values"]["off"] == {"us": 24.0, "spread_us": [20.0, 24.0, 30.0], "ratio": 2.0}
    assert made["results"][0]["values"][""]["us"] == 12.0
    assert "24.0  2.00" in capsys.readouterr().out
    page = script("report").render([("ablation.json", made)])
    assert "| all_reduce | out of place | 64 KiB | 12.0 | 1.00 | 24.0 | 2.00 | 0 |" in page
    monkeypatch.setenv("SOME_VARIABLE", "set")
    with pytest.raises(SystemExit):
        ablation.main(words)


def test_a_failed_job_is_kept_as_such(ablation: Any) -> None:
    args = SimpleNamespace(n=2, variable="V", values="a,b", rounds=1)
    made = ablation.document(args, [("a", "all_reduce", benched(5.0))], ["round 0: exit status 1"], datetime.now())
    assert made["failed"] == ["round 0: exit status 1"]
    assert "   -" in ablation.table(made)
