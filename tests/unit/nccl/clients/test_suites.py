"""torch's tests with the door and without: which run again, which are compared, and what becomes of one that dies."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.nccl_clients import suites, ways
from tests.nccl_clients.suite_rank import WAITING
from tests.nccl_clients.suites import LOST, NOT_RUN, differences, read, suite
from tests.nccl_clients.ways import DOOR, PLAIN, Ran

NAMES = ("first", "dies", "after", "other")
TEXT = """\
import os
import unittest

class T(unittest.TestCase):
    def test_good(self): pass
    def test_dies(self): os._exit(3)
    def test_bad(self): self.fail("so")
    def test_skips(self): self.skipTest("so")
"""


def played(monkeypatch: pytest.MonkeyPatch, dies: Sequence[str], *, seconds: float = 0.0) -> list[list[str]]:
    """Let processes run NAMES, of which some end their process; what each process was told to leave out."""
    told: list[list[str]] = []
    now = [1000.0]
    monkeypatch.setattr(suites.time, "monotonic", lambda: now[0])

    def run(by: str, argv: Sequence[str], left: float, variables: Mapping[str, str]) -> Ran:
        words = json.loads(argv[-1])
        told.append(words["leave_out"])
        mine = [name for name in NAMES[words["first"] :: words["step"]] if name not in words["leave_out"]]
        lines = [{"test": name, "outcome": WAITING} for name in mine]
        wrong = ""
        for name in mine:
            lines.append({"test": name, "outcome": "began"})
            now[0] += seconds
            if by in dies or name in dies:
                wrong = "exit status 1"
                break
            lines.append({"test": name, "outcome": "passed"})
        Path(argv[-2], f"{words['first']}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return Ran(wrong, "its last words", 1.0, {"ours": 2, "nccls": 1})

    monkeypatch.setattr(ways, "run", run)
    return told


def test_a_test_that_takes_its_process_with_it_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = played(monkeypatch, ["dies"])
    found = suite(PLAIN, Path("file.py"), 1, "", (), 600)
    assert told == [[], ["first", "dies"]]
    assert {name: one["outcome"] for name, one in found["tests"].items()} == {
        "first": "passed", "dies": LOST, "after": "passed", "other": "passed"
    }  # fmt: skip
    assert found["tests"]["dies"]["error"] == "its last words"
    assert found["calls"] == {"ours": 4, "nccls": 2}


def test_what_had_no_time_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, ["dies"], seconds=400.0)
    found = suite(PLAIN, Path("file.py"), 1, "", (), 600)
    assert {name: one["outcome"] for name, one in found["tests"].items()} == {"first": "passed", "dies": NOT_RUN}


def test_what_plain_nccl_does_not_pass_is_left_out_with_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each share runs its own."""
    told = played(monkeypatch, ["dies"])
    row, failed = suites.compared(Path("file.py"), 2, "", 600)
    assert row["left_out"] == {"dies": LOST}
    assert failed == row["differences"] == []
    assert told[-1] == told[-2] == ["dies"]
    assert row["counts"] == {PLAIN: {"passed": 3, LOST: 1}, DOOR: {"passed": 3}}


def test_a_test_that_the_door_alone_loses_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, [DOOR])
    row, failed = suites.compared(Path("file.py"), 1, "", 600)
    assert failed == [f"file.py: {name}: passed by NCCL, lost with the door" for name in sorted(NAMES)]
    assert [one["test"] for one in row["differences"]] == sorted(NAMES)


def test_only_tests_that_ran_both_ways_are_compared() -> None:
    plain = {"a": {"outcome": "passed"}, "b": {"outcome": "passed"}, "c": {"outcome": NOT_RUN}}
    assert differences(plain, {"a": {"outcome": NOT_RUN}, "c": {"outcome": "passed"}}) == []
    found = differences(plain, {"b": {"outcome": "failed", "error": "so"}})
    assert found == [{"test": "b", PLAIN: "passed", DOOR: "failed", "error": "so"}]


@pytest.mark.slow
def test_the_process_writes_down_how_each_test_ended(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TEXT)

    def outcomes(**told: Any) -> dict[str, str]:
        words = json.dumps({"first": 0, "step": 1, "pattern": "", "leave_out": [], **told})
        argv = [sys.executable, "-m", "tests.nccl_clients.suite_rank", str(tmp_path / "test_some.py"), str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*argv, words], env=env, cwd=ROOT, capture_output=True, timeout=60, check=False)
        found = read(tmp_path / f"{told.get('first', 0)}.jsonl")
        return {name.rpartition("::")[2]: one["outcome"] for name, one in found.items()}

    ends = {"test_bad": "failed", "test_dies": LOST, "test_good": WAITING, "test_skips": WAITING}
    assert outcomes() == ends
    left = [f"test_some.py::T::{name}" for name in ("test_bad", "test_dies")]
    assert outcomes(leave_out=left) == {"test_good": "passed", "test_skips": "skipped"}
    assert outcomes(pattern="_good") == {"test_good": "passed"}
    assert outcomes(first=1, step=3) == {"test_dies": LOST}
