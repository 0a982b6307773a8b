"""tests/clients: programs see Communicators without being changed, and how they end is judged beside the plain run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import __main__ as clients
from tests.clients.rank import BLINK, PLAIN, named

PROGRAM = """
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
RESULT = {"total": total, "ours": float(type(MPI.COMM_WORLD).__module__.startswith("blinkmpi"))}
"""
TESTS = """
import unittest
from mpi4py import MPI
class Test(unittest.TestCase):
    def test_passes(self): assert MPI.COMM_WORLD.allreduce(1) == 2
    def test_fails_on_one_rank(self): assert MPI.COMM_WORLD.rank == 0, "not here"
    @unittest.skip("not today")
    def test_is_skipped(self): ...
"""


def client(*job: str) -> clients.Client:
    return clients.Client("mine", "numpy", 2, (job,))


@pytest.mark.slow
@pytest.mark.parametrize("by", [BLINK, PLAIN])
def test_a_program_runs_unchanged(tmp_path: Path, by: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    (test,) = clients.run(client("--program", str(path)), by)["tests"].values()
    assert test["outcome"] == "passed"
    assert test["result"] == {"total": 1, "ours": float(by == BLINK)}


@pytest.mark.slow
def test_a_program_that_fails_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.rank == 0, 'not here'\nMPI.COMM_WORLD.Barrier()\n")
    found = clients.run(client("--program", str(path)), PLAIN)
    assert found["tests"]["mine.py"]["outcome"] == "failed"
    assert "not here" in found["tests"]["mine.py"]["error"]
    assert found["outputs"]


@pytest.mark.slow
def test_a_test_is_what_it_is_on_its_worst_rank(tmp_path: Path) -> None:
    path = tmp_path / "test_mine.py"
    path.write_text(TESTS)
    found = clients.run(client("--tests", str(path)), BLINK)
    ends = {name.rpartition("::")[2]: test["outcome"] for name, test in found["tests"].items()}
    assert ends == {"test_passes": "passed", "test_fails_on_one_rank": "failed", "test_is_skipped": "skipped"}
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}


def test_what_a_rank_has_begun_and_not_ended(tmp_path: Path) -> None:
    lines: dict[int, list[dict[str, Any]]] = {
        0: [{"test": "a", "outcome": "began"}, {"test": "a", "outcome": "passed", "seconds": 1.0}],
        1: [{"test": "a", "outcome": "began"}, {"test": "a", "outcome": "passed", "seconds": 2.0},
            {"test": "b", "outcome": "began"}],
    }  # fmt: skip
    for rank, some in lines.items():
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    for unended in ("hung", clients.DIED):
        found = clients.read(tmp_path, 2, unended)
        assert {name: (test["outcome"], test["seconds"]) for name, test in found.items()} == {
            "a": ("passed", 2.0), "b": (unended, 0.0),
        }  # fmt: skip


def run_of(**outcomes: Any) -> dict[str, Any]:
    return {"tests": {name: one if isinstance(one, dict) else {"outcome": one} for name, one in outcomes.items()}}


def test_only_what_ends_otherwise_is_a_difference() -> None:
    ours = run_of(same="passed", both="failed", worse={"outcome": "failed", "error": "E"}, gone="passed")
    plain = run_of(same="passed", both="failed", worse="passed")
    found = {one["test"]: (one[BLINK], one[PLAIN]) for one in clients.differences(ours, plain)}
    assert found == {"worse": ("failed", "passed"), "gone": ("passed", "not run")}


def test_results_may_differ_by_rounding() -> None:
    def of(**result: float) -> dict[str, Any]:
        return run_of(train={"outcome": "passed", "result": result})

    assert not clients.differences(of(loss=1.0), of(loss=1.0 + 1e-7))
    assert clients.differences(of(loss=1.0), of(loss=1.001))
    assert clients.differences(of(loss=1.0), of(loss=1.0, error=0.5))
    assert clients.differences(of(loss=1.0), run_of(train="passed"))


def test_missing_sources_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["clients", "--sources", str(tmp_path)])
    with pytest.raises(SystemExit):
        clients.main()
    assert "test_communication.py is missing, of heat" in capsys.readouterr().err
    assert named("/a/b/test_x.py::Test::test_y") == "test_x.py::Test::test_y"
