"""The harness ends every job in time, reports what happened on which rank, and finds what is left in /dev/shm."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import (
    PATIENCE_S,
    ROOT,
    Job,
    Pools,
    Report,
    SharedMemoryWatch,
    cases,
    run_command,
    run_ranks,
    wait_until,
)
from tests.harness.shared_memory import SHM

pytestmark = pytest.mark.mpi_skip  # each of these starts an mpirun of its own

CASES = Path(cases.__file__)


def verdicts(report: Report) -> list[str]:
    return [v.outcome for v in report.verdicts]


def lives(pid: int) -> bool:
    """Tell whether a process is there and not a zombie that waits for its new parent."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_function_gets_its_arguments_and_its_output_is_kept() -> None:
    report = run_ranks(3, cases.echo, 20, args=(7,), kwargs={"text": "words"})
    assert report.problem is None
    assert verdicts(report) == ["passed"] * 3
    assert {f"rank {r} of 3: 7 words" for r in range(3)} <= set(report.job.output.splitlines())


def test_all_ranks_that_fail_together_are_heard() -> None:
    report = run_ranks(2, cases.everybody_fails, 20)
    assert report.problem is not None
    assert "ValueError: this is rank 0" in report.problem
    assert "ValueError: this is rank 1" in report.problem


def test_ranks_must_agree_to_skip() -> None:
    report = run_ranks(2, cases.one_skips, 20)
    assert report.skipped is None
    assert report.problem is not None
    assert verdicts(report) == ["skipped", "passed"]


def test_an_early_exit_is_a_failure() -> None:
    report = run_ranks(2, cases.exits_early, 20)
    assert report.problem is not None
    assert "SystemExit: 3" in report.problem


@pytest.mark.parametrize(("target", "silent", "trace"), [
    (cases.hang_in_mpi, 0, "in hang_in_mpi"),
    (cases.hang_in_sleep, 1, "in hang_in_sleep"),
    (cases.crash, 1, "Segmentation fault"),
    (cases.killed, 1, ""),
    (cases.stopped, 1, ""),
])  # fmt: skip
def test_what_hangs_or_dies_is_ended_and_reported(target: Callable[..., None], silent: int, trace: str) -> None:
    report = run_ranks(2, target, 1.5)
    assert report.job.seconds < 1.5 + 2 * PATIENCE_S, "its start, its deadline, its end"
    assert report.job.rc != 0
    assert report.verdicts[silent].outcome == "silent"
    assert trace in report.verdicts[silent].detail
    assert report.problem is not None
    assert f"rank {silent}: ended without a verdict" in report.problem


def test_a_job_can_be_watched_and_signalled() -> None:
    program = "import time; print('ready'); time.sleep(60)"
    with Job(3, [sys.executable, "-c", program], timeout=2 * PATIENCE_S) as job:
        job.wait_for("ready", count=3)
        before = job.pids()
        assert sorted(before) == [0, 1, 2]
        job.signal(2, signal.SIGKILL)
        outcome = job.wait()
    assert outcome.rc != 0
    assert not outcome.timed_out
    assert outcome.leftovers == ()
    assert job.pids() == {}


def test_closing_a_job_leaves_no_process() -> None:
    """Neither do ranks that hide in a process group and session of their own."""
    program = "import os, time; os.fork() and os._exit(time.sleep(60)); os.setsid(); print('ready'); time.sleep(60)"
    with Job(2, [sys.executable, "-c", program], timeout=2 * PATIENCE_S) as job:
        job.wait_for("ready", count=2)
        pids = job.pids()
        children = [
            int(pid) for r in pids for pid in Path(f"/proc/{pids[r]}/task/{pids[r]}/children").read_text().split()
        ]
    assert len(pids) == len(children) == 2
    assert not [pid for pid in [*pids.values(), *children] if lives(pid)]


def test_decorated_functions_are_ordinary_tests_outside() -> None:
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(CASES)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=6 * PATIENCE_S)
    assert "1 failed, 5 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "ValueError: seven is not eight" in done.stdout
    assert "not today" in done.stdout


def pytest_on_ranks(n: int, *words: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--with-mpi", str(CASES), *words]
    outcome = run_command(n, argv, timeout=60, cwd=ROOT)
    assert not outcome.timed_out
    return outcome.rc, outcome.output


def test_decorated_functions_run_in_place_under_mpirun() -> None:
    rc, output = pytest_on_ranks(2, "-k", "not fail")
    assert rc == 0, output
    assert output.count("4 passed, 2 skipped") == 1, output
    assert "needs mpirun -np 1, runs on 2" in output


def test_a_failure_under_mpirun_ends_the_job_and_is_shown() -> None:
    rc, output = pytest_on_ranks(2)
    assert rc != 0
    assert "rank 1 of 2: " in output
    assert "ValueError: seven is not eight" in output


# ---------------------------------------------------------------- ranks that stay


def noted(pools: Pools, folder: Path, **arguments: Any) -> list[list[str]]:
    """The process of each rank, and the algorithm that it was told."""
    report = pools.run(2, cases.note, 20, kwargs={"folder": folder}, **arguments)
    assert report.problem is None, report.problem
    return [(folder / str(rank)).read_text().split() for rank in range(2)]


def test_ranks_stay_for_the_next_function(tmp_path: Path) -> None:
    with Pools() as pools:
        first = noted(pools, tmp_path)
        assert noted(pools, tmp_path) == first
        (pid, algo), _ = noted(pools, tmp_path, env={"BLINKMPI_ALGO": "trees"})
        assert ([pid], algo) == (first[0], "trees")
        assert noted(pools, tmp_path) == first, "a setting of one function is gone with it"
        other = noted(pools, tmp_path, env={"OMP_NUM_THREADS": "2"})
        assert not {pid for (pid,) in other} & {pid for (pid,) in first}, "what is read at the start takes another job"
        assert noted(pools, tmp_path) == first
        assert pools.end() == ""
    assert not [pid for (pid,) in first if lives(int(pid))]


@pytest.mark.parametrize("target", [cases.everybody_fails, cases.hang_in_sleep, cases.crash, cases.exits_early])
def test_ranks_of_which_one_fails_are_replaced(target: Callable[..., None], tmp_path: Path) -> None:
    with Pools() as pools:
        first = noted(pools, tmp_path)
        assert pools.run(2, target, 2).problem is not None
        assert not [pid for (pid,) in first if lives(int(pid))]
        assert not {pid for (pid,) in noted(pools, tmp_path)} & {pid for (pid,) in first}
        assert pools.end() == ""


def test_ranks_that_do_not_leave_in_peace_are_told(tmp_path: Path) -> None:
    with Pools() as pools:
        (pid,), _ = noted(pools, tmp_path)
        os.kill(int(pid), signal.SIGKILL)
        assert "the 2 ranks of this session ended badly" in pools.end()


# ---------------------------------------------------------------- shared memory


# Keeps a file open; makes and removes others meanwhile; the last one stays behind.
FOREIGN = """
import os, sys, time
base, held = sys.argv[1], open(sys.argv[1], "w")
while not os.path.exists(base + ".end"):
    short = open(base + ".short", "w")
    time.sleep(0.03)
    os.remove(base + ".short")
    time.sleep(0.03)
open(base + ".left", "w")
"""
MAPS = """
import mmap, os, sys, time
with open(f"{sys.argv[1]}.{os.getpid()}", "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
while not os.path.exists(f"{sys.argv[1]}.seen"):
    time.sleep(0.01)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A name as Open MPI gives to its files; all that begin with it are removed in the end."""
    path = SHM / f"sm_segment.host.0.{secrets.token_hex(4)}"
    yield path
    for file in SHM.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)


def seen(watch: SharedMemoryWatch, base: Path) -> None:
    """Let two ranks go on when their files have been seen."""
    wait_until(lambda: len(watch.left()) == 2, "the files of both ranks are seen")
    Path(f"{base}.ours.seen").touch()


def test_only_what_the_processes_of_a_test_leave_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedMemoryWatch() as watch, subprocess.Popen([sys.executable, "-c", FOREIGN, str(base)]) as foreign:
        for name, value in watch.environment.items():
            monkeypatch.setenv(name, value)
        with Job(2, [sys.executable, "-c", MAPS, f"{base}.ours"], timeout=2 * PATIENCE_S) as job:
            seen(watch, base)
            assert job.wait().rc == 0
        assert base.exists()
        Path(f"{base}.end").touch()
        assert foreign.wait(PATIENCE_S) == 0
        assert Path(f"{base}.left").exists()
        left = watch.left()
        assert len(left) == 2
        assert all(name.startswith(f"{base.name}.ours.") for name in left)


def test_what_is_removed_in_time_is_not_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedMemoryWatch() as watch:
        for name, value in watch.environment.items():
            monkeypatch.setenv(name, value)
        program = f"{MAPS}os.remove(file.name)"
        with Job(2, [sys.executable, "-c", program, f"{base}.ours"], timeout=2 * PATIENCE_S) as job:
            seen(watch, base)
            assert job.wait().rc == 0
        assert watch.left() == []
