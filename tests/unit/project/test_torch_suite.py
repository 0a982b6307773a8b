"""The program that runs torch's own tests: which run again, and how each is counted."""

import unittest
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs
from tests.torch_suite import __main__ as suite

pytestmark = pytest.mark.mpi_skip


def row(test: str, outcome: str, *, started: bool) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "started": started}


def test_what_torch_skips_for_our_name_runs_again_as_if_we_were_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, list[str] | None]] = []

    def run(n: int, shares: list[suite.Share], settings: dict[str, str]) -> list[dict[str, Any]]:
        if settings["BACKEND"] == "gloo":
            assert shares[0].names == ["sparse"]
            return [row("sparse", "passed", started=True)]
        assert (n, settings["BACKEND"], [share.first for share in shares]) == (2, "blink", [0, 1])
        names, other = shares[0].names, settings.get("TAKEN_FOR")
        asked.append((other, names))
        if names is None:
            return [row("small", "skipped", started=True), row("sparse", "skipped", started=False),
                    row("all", "passed", started=True), row("cuda", "skipped", started=False),
                    row("flaky", "skipped", started=False)]  # fmt: skip
        ends = {("sparse", "gloo"): "failed", ("cuda", "gloo"): "skipped"}  # that one by a rank
        return [row(name, ends.get((name, other), "skipped"), started=(name, other) in ends) for name in names]

    monkeypatch.setattr(suite, "run", run)
    rows = suite.on_ranks(2, "*", "blink", "cpu", 2)
    assert asked == [(None, None), ("gloo", ["sparse", "cuda", "flaky"]), ("mpi", ["flaky"])]
    assert {one["test"]: (one["outcome"], one.get("taken_for")) for one in rows} == {
        "all": ("passed", None), "cuda": ("skipped", "gloo"), "flaky": ("skipped", None),
        "small": ("skipped", None), "sparse": ("failed", "gloo"),
    }  # fmt: skip


def test_what_fails_by_torchs_own_backend_too_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a process that has died, whichever it was, has failed."""

    def run(n: int, shares: list[suite.Share], settings: dict[str, str]) -> list[dict[str, Any]]:
        ours = settings["BACKEND"] == "blink"
        assert ours or (settings["BACKEND"], shares[0].names) == ("nccl", ["both", "ours"])
        some = [row("both", "failed", started=True), row("ours", "failed" if ours else "passed", started=True)]
        return [{**one, "text": settings["BACKEND"]} for one in some] + [suite.LOST]

    monkeypatch.setattr(suite, "run", run)
    rows = suite.on_ranks(2, "*", "blink", "cuda", 1)
    assert [(one["test"], one["outcome"], one.get("by_torchs_own")) for one in rows] == [
        ("all", "failed", None), ("both", suite.FAILS_BY_BOTH, "nccl"), ("ours", "failed", None),
    ]  # fmt: skip
    assert suite.LOST["outcome"] == "failed"


def test_tests_that_were_lost_the_second_time_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(n: int, shares: list[suite.Share], settings: dict[str, str]) -> list[dict[str, Any]]:
        return [suite.LOST] if "TAKEN_FOR" in settings else [row("sparse", "skipped", started=False)]

    monkeypatch.setattr(suite, "run", run)
    rows = suite.on_ranks(2, "*", "blink", "cpu", 1)
    assert [(one["test"], one["outcome"]) for one in rows] == [("all", "failed"), ("sparse", "skipped")]


class Ends(unittest.TestCase):
    """Tests that end in each way; not for pytest."""

    __test__ = False

    @unittest.skip("another backend's")
    def test_skipped(self) -> None: ...

    def test_monitored_barrier_gloo(self) -> None:
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    def test_monitored_barrier_wrong(self) -> None:
        raise ValueError("another error")

    def test_ddp_profiling_execution_trace(self) -> None:
        raise AssertionError("String comparison failed: 'blink' != 'nccl'")

    def test_right(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "outcome", "started"),
    [("skipped", "skipped", False), ("monitored_barrier_gloo", "refused", True),
     ("monitored_barrier_wrong", "failed", True), ("ddp_profiling_execution_trace", "names another backend", True),
     ("right", "passed", True)],
)  # fmt: skip
def test_how_a_test_ended(name: str, outcome: str, started: bool) -> None:
    recorder = suite.Recorder()
    Ends(f"test_{name}").run(recorder)
    (found,) = recorder.rows
    assert (found["outcome"], found["started"]) == (outcome, started)
    assert ("text" in found) == (outcome != "passed")


def test_results_are_kept_in_a_folder_that_is_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x.json", "x.json.0"):
        jobs.write(tmp_path / "new" / "x.json", {"name": name})
        assert jobs.load(tmp_path / "new" / name) == {"name": name}
        assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / name}\n"
