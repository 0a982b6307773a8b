"""Ranks that stop, die, leave, fail or disagree: the others hear of it in time, in words, and nothing is left behind.

This file is also the program of a rank: ``python tests/mpi/test_faults.py CASE [ARGUMENT...]``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import blinkmpi
from blinkmpi.engine import Engine
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    MismatchError,
    PeerLost,
    RemoteError,
)
from blinkmpi.job import Job as CallJob
from blinkmpi.transport import host
from blinkmpi.transport.host import HostTransport
from tests.harness import ROOT, Job, Outcome, mpi, mpirun

N = 4
VICTIM = 2
SHM = Path("/dev/shm")
RUNNERS = ("c", "numpy")


# ---------------------------------------------------------------- what a rank says, and how we read it


def say(**facts: object) -> None:
    """Print one line that :func:`said` finds in the output of the job."""
    os.write(1, f"@{json.dumps({'rank': MPI.COMM_WORLD.rank, **facts})}\n".encode())


def said(outcome: Outcome, key: str) -> dict[int, Any]:
    """What each rank has said under a key."""
    facts = [json.loads(text) for text in re.findall(r"@(\{.*?\})$", outcome.output, re.MULTILINE)]
    return {f["rank"]: f[key] for f in facts if key in f}


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Make a call; say how long it took and how it failed."""
    since = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except (BlinkError, KeyboardInterrupt) as caught:
        error = caught
    say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    return error


def start(case: str, *arguments: str, timeout: float = 30.0, options: tuple[str, ...] = (), n: int = N) -> Job:
    """Start this file's ``case`` on ``n`` ranks."""
    argv = [sys.executable, __file__, case, *arguments]
    return Job(n, argv, timeout=timeout, env={"PYTHONPATH": str(ROOT)}, options=options)


def finish(job: Job, within: float) -> Outcome:
    """Wait for the end of a job, which must come by itself and in time, and leave no process."""
    since = time.monotonic()
    outcome = job.wait()
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), outcome.output
    assert time.monotonic() - since < within, outcome.output
    return outcome


def mapped() -> str:
    """The memory maps of all processes."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(path.read_text())
        except OSError:  # it has ended, or is not ours
            continue
    return "".join(texts)


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir(SHM))
    yield
    new = set(os.listdir(SHM)) - before
    used = mapped() if new else ""  # other jobs on this machine may come and go
    assert not [name for name in new if name not in used and (SHM / name).exists()]


# ---------------------------------------------------------------- stopped


@pytest.mark.parametrize("how", [*RUNNERS, "mpi"])
def test_a_stopped_rank_is_named_within_the_deadline(how: str) -> None:
    deadline = 3.0
    with start("big", how, str(deadline), "SIGSTOP") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=deadline + 2 + 3)
    assert outcome.rc != 0  # MPI_Finalize would have waited for ever
    texts = texts_of_others(outcome, deadline)
    for text in texts.values():
        assert "allreduce" in text
        assert re.search(r"chunk \d+ of \d+ of tree \d+" if how != "mpi" else "its part of MPI's own", text)
        assert len(text) < 500
    assert {r: said(outcome, "left").get(r) for r in texts} == dict.fromkeys(texts, True)
    assert "ends the job, or MPI_Finalize would wait for ever" in outcome.output


def texts_of_others(outcome: Outcome, deadline: float) -> dict[int, str]:
    """What the others said, after a check: each named the stopped rank in time, and its communicator is dead."""
    errors, texts, seconds = (said(outcome, key) for key in ("error", "text", "seconds"))
    pid = said(outcome, "pid")[VICTIM]
    others = [r for r in range(N) if r != VICTIM]
    assert {r: errors.get(r) for r in others} == dict.fromkeys(others, "CollectiveTimeout")
    for rank in others:
        assert seconds[rank] < deadline + 2
        assert f"rank {VICTIM} (process {pid}) is stopped" in texts[rank]
    assert {r: said(outcome, "again").get(r) for r in others} == dict.fromkeys(others, "PeerLost")
    return {r: texts[r] for r in others}


def case_big(how: str, timeout: str, signal_name: str) -> None:
    """A 256 MiB Allreduce, in the middle of which one rank gets a signal."""
    algo, runner = ("allreduce:mpi", None) if how == "mpi" else (None, how)
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo=algo, runner=runner) as comm:
        vector = np.ones(64 << 20, np.float32)
        comm.Allreduce(MPI.IN_PLACE, vector)
        if comm.rank == VICTIM:
            signal_amid_a_call(signal.Signals[signal_name])
        say(ready=True, pid=os.getpid())
        calls_until_death(comm, vector)
    say(left=True)


def signal_amid_a_call(signum: signal.Signals) -> None:
    """Make this process signal itself 20 ms after it has begun to move data."""

    def late(work: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any) -> Any:
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signum)).start()
            return work(*args)

        return begun

    HostTransport.call = late(HostTransport.call)  # type: ignore[method-assign]
    Engine._wait = late(Engine._wait)  # type: ignore[method-assign]


def calls_until_death(
    comm: blinkmpi.Communicator, vector: np.ndarray[Any, Any], call: Callable[[], object] | None = None
) -> None:
    """Call (an Allreduce) until it fails; then the communicator is dead, says so at once and can be freed."""
    call = call or (lambda: comm.Allreduce(MPI.IN_PLACE, vector))
    since = time.monotonic()
    try:
        while True:
            since = time.monotonic()
            call()
    except BlinkError as error:
        say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    since = time.monotonic()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Barrier()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Iallreduce(MPI.IN_PLACE, vector).Wait()
    assert time.monotonic() - since < 0.5
    say(again="PeerLost")


# ---------------------------------------------------------------- killed


@pytest.mark.parametrize("how", [*RUNNERS, "mpi"])
def test_a_killed_rank_ends_the_job(how: str) -> None:
    with start("big", how, "20", "SIGKILL") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=5)
    assert outcome.rc != 0


@pytest.mark.parametrize("how", [*RUNNERS, "mpi"])
def test_under_fault_tolerance_the_others_hear_of_a_killed_rank(how: str) -> None:
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun --with-ft is Open MPI's")
    with start("big", how, "20", "SIGKILL", options=("--with-ft", "ulfm")) as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=8)
    others = [r for r in range(N) if r != VICTIM]
    assert {r: said(outcome, "error").get(r) for r in others} == dict.fromkeys(others, "PeerLost"), outcome.output
    assert all(said(outcome, "seconds")[r] < 3 for r in others)
    assert all(f"rank {VICTIM} (process" in said(outcome, "text")[r] for r in others)
    assert said(outcome, "left") == dict.fromkeys(others, True)


# ---------------------------------------------------------------- amid reading another's memory

LENDERS = (("Allgather", -1), ("Bcast", 0), ("Bcast", VICTIM))  # the victim reads and is read, reads alone, is read


@pytest.mark.parametrize(("method", "root"), LENDERS)
def test_a_rank_that_stops_amid_cma_is_named(method: str, root: int) -> None:
    deadline = 3.0
    with start("lent", method, str(root), str(deadline), "SIGSTOP") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=deadline + 2 + 3)
    assert outcome.rc != 0
    texts_of_others(outcome, deadline)


@pytest.mark.parametrize(("method", "root"), LENDERS)
def test_a_rank_that_is_killed_amid_cma_ends_the_job(method: str, root: int) -> None:
    with start("lent", method, str(root), "20", "SIGKILL") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=5)
    assert outcome.rc != 0


@pytest.mark.parametrize(("method", "root"), LENDERS)
def test_under_fault_tolerance_a_rank_killed_amid_cma_is_named(method: str, root: int) -> None:
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun --with-ft is Open MPI's")
    with start("lent", method, str(root), "20", "SIGKILL", options=("--with-ft", "ulfm")) as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=8)
    others = [r for r in range(N) if r != VICTIM]
    assert {r: said(outcome, "error").get(r) for r in others} == dict.fromkeys(others, "PeerLost"), outcome.output
    assert all(said(outcome, "seconds")[r] < 3 for r in others)
    assert all(f"rank {VICTIM} (process" in said(outcome, "text")[r] for r in others)


def case_lent(method: str, root: str, timeout: str, signal_name: str) -> None:
    """256 MiB by cma, in the middle of which one rank gets a signal."""
    algo = "broadcast:direct;allgather:direct"
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo=algo, runner="c") as comm:
        engine = comm._engine()
        rules = tuple(r for r in engine.plans.rules if r.road == "cma" or r.collective == "allreduce")
        engine.plans = replace(engine.plans, rules=rules)
        vector = np.ones(64 << 20, np.float32)
        arguments = (MPI.IN_PLACE, vector) if method == "Allgather" else (vector, int(root))
        getattr(comm, method)(*arguments)
        assert all(way.loaded.lent for way in engine._ways.values() if way.loaded)
        if comm.rank == VICTIM:
            signal_amid_a_call(signal.Signals[signal_name])
        say(ready=True, pid=os.getpid())
        calls_until_death(comm, vector, lambda: getattr(comm, method)(*arguments))
    say(left=True)


# ---------------------------------------------------------------- never comes


def test_a_rank_that_never_comes_is_named() -> None:
    with start("absent", "sleep", "1.5") as job:
        outcome = finish(job, within=15)
    others = [r for r in range(N) if r != VICTIM]
    assert {r: said(outcome, "error").get(r) for r in others} == dict.fromkeys(others, "CollectiveTimeout")
    for rank in others:
        assert said(outcome, "seconds")[rank] < 3.5
        text = said(outcome, "text")[rank]
        assert re.search(rf"rank {VICTIM} \(process \d+\) runs, last entered call 2 barrier\(\)", text), text
        assert "call 3, allreduce(8 x float64, op sum)" in text


@pytest.mark.parametrize("how", ["exit0", "exit3", "end"])
def test_a_rank_that_left_is_noticed_long_before_the_deadline(how: str) -> None:
    with start("absent", how, "20") as job:
        outcome = finish(job, within=8)
    others = [r for r in range(N) if r != VICTIM]
    assert {r: said(outcome, "error").get(r) for r in others} == dict.fromkeys(others, "PeerLost")
    for rank in others:
        assert said(outcome, "seconds")[rank] < 3
        text = said(outcome, "text")[rank]
        assert re.search(rf"rank {VICTIM} \(process \d+\) has left .*last entered call 2 barrier\(\)", text), text
    assert (outcome.rc == 0) == (how != "exit3"), outcome.output  # all have left: MPI_Finalize does not hang


def test_a_rank_that_comes_late_hears_that_it_is_too_late() -> None:
    """And all of them can end in peace."""
    with start("absent", "late", "2") as job:
        outcome = finish(job, within=10)
    assert said(outcome, "error") == dict.fromkeys(range(N), "CollectiveTimeout")
    assert said(outcome, "seconds")[VICTIM] < 0.5
    assert outcome.rc == 0, outcome.output


def case_absent(how: str, timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout))
    comm.Barrier()
    comm.Barrier()
    if comm.rank == VICTIM:
        if how == "end":
            return
        if how.startswith("exit"):
            sys.exit(int(how.removeprefix("exit")))
        time.sleep(60 if how == "sleep" else 3)
    attempt(lambda: comm.Allreduce(np.ones(8), np.empty(8)))
    comm.Free()


def test_a_rank_may_leave_when_it_has_done_its_part() -> None:
    """Ranks 1 and 2 are gone while the root still waits for rank 3."""
    with start("early", "20") as job:
        outcome = finish(job, within=10)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "total") == {0: float(N)}


def case_early(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo="reduce:^mpi", runner="numpy")
    if comm.rank == N - 1:
        run = host.step_numpy

        def slow(*args: Any) -> Any:  # it has come, but does not go on
            time.sleep(1.0)
            return run(*args)

        host.step_numpy = slow
    total = np.zeros(100)
    comm.Reduce(np.ones(100), total if comm.rank == 0 else None, root=0)
    if comm.rank == 0:
        say(total=float(total[50]))


# ---------------------------------------------------------------- errors and interrupts


def test_an_error_on_one_rank_ends_the_job() -> None:
    with start("raises", "60") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job, within=5)
    assert outcome.rc != 0
    assert "ValueError: seven is not eight" in outcome.output


def case_raises(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout))
    comm.Barrier()
    say(ready=True)
    if comm.rank == 1:
        raise ValueError("seven is not eight")
    comm.Barrier()


def test_an_uncaught_timeout_ends_the_job() -> None:
    with start("uncaught", "1") as job:
        outcome = finish(job, within=8)
    assert outcome.rc != 0
    assert "CollectiveTimeout: call 1, barrier(): rank 2" in outcome.output


def case_uncaught(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout))
    if comm.rank == VICTIM:
        time.sleep(60)
    comm.Barrier()


@pytest.mark.parametrize("how", [*RUNNERS, "mpi"])
def test_an_interrupt_is_raised_in_the_call_and_heard_by_the_others(how: str) -> None:
    with start("interrupt", how, "30") as job:
        job.wait_for('"ready"', count=N)
        time.sleep(0.3)
        job.signal(1, signal.SIGINT)
        outcome = finish(job, within=5)
    assert outcome.rc != 0
    assert said(outcome, "error") == {1: "KeyboardInterrupt", 3: "PeerLost"}
    assert "rank 1 (process" in said(outcome, "text")[3]
    assert "gave up with KeyboardInterrupt" in said(outcome, "text")[3]
    assert re.search(r"^KeyboardInterrupt$", outcome.output, re.MULTILINE), outcome.output


def case_interrupt(how: str, timeout: str) -> None:
    """Ranks 0 and 2 do not come, or come and do not go on; rank 1 is interrupted; rank 3 hears of it."""
    algo, runner = ("allreduce:mpi", None) if how == "mpi" else (None, how)
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), runner=runner, algo=algo)
    comm.Barrier()
    say(ready=True)
    if comm.rank in (0, 2):
        if how == "mpi":  # they enter the call, but not MPI's part of it
            CallJob.mpi = lambda *_: time.sleep(60)  # type: ignore[assignment, method-assign]
            comm.Allreduce(np.ones(8), np.empty(8))
        time.sleep(60)
    error = attempt(lambda: comm.Allreduce(np.ones(8), np.empty(8)))
    if comm.rank == 1 and error is not None:
        time.sleep(1)
        raise error


# ---------------------------------------------------------------- disagreement


def the_same_on_all(comm: MPI.Intracomm, text: str) -> None:
    texts = comm.allgather(text)
    assert len(set(texts)) == 1, texts


@mpi(ranks=(2, 4), timeout=60)
def test_ranks_that_disagree_all_hear_both_sides(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    x, y, short = np.ones(100), np.zeros(100), np.ones(99)

    def pairs(ours: blinkmpi.Communicator) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """By what differs: what the last rank calls, and what the others do."""
        return {
            "op": (lambda: ours.Allreduce(x, y, MPI.MAX), lambda: ours.Allreduce(x, y)),
            "count": (lambda: ours.Allreduce(short, y[:99]), lambda: ours.Allreduce(x, y)),
            "type": (lambda: ours.Allreduce(x.astype("f4"), y.view("f4")[:100]), lambda: ours.Allreduce(x, y)),
            "root": (lambda: ours.Bcast(y, root=1), lambda: ours.Bcast(y, root=0)),
            "collective": (lambda: ours.Bcast(y), lambda: ours.Allreduce(x, y)),
            "barrier": (lambda: ours.Barrier(), lambda: ours.Allreduce(x, y)),
            "non-blocking": (lambda: ours.Ibarrier().Wait(), lambda: ours.Iallreduce(x, y).Wait()),
        }

    for runner in RUNNERS:
        with blinkmpi.Communicator(comm, timeout=20, runner=runner) as ours:
            for what, (odd, even) in pairs(ours).items():
                with pytest.raises(MismatchError) as caught:
                    (odd if last else even)()
                text = str(caught.value)
                the_same_on_all(comm, text)
                assert f"rank {comm.size - 1}: " in text, what
                assert ("rank 0: " if comm.size == 2 else "ranks 0-2: ") in text, what
                assert len(text) < 400
                assert (y == 0).all(), what
                ours.Allreduce(x, y)
                assert (y == comm.size).all()
                y[:] = 0


@mpi(ranks=(2, 4), timeout=60)
def test_bad_arguments_on_one_rank_are_an_error_on_all(comm: MPI.Intracomm) -> None:
    n, last = comm.size, comm.rank == comm.size - 1
    x, y = np.arange(96.0), np.full(96, -1.0)
    locked = y.copy()
    locked.flags.writeable = False
    strided, objects = np.ones(192)[::2], np.array([None] * 96)

    def cases(ours: blinkmpi.Communicator) -> dict[str, tuple[type[BlinkError], Callable[[], Any], Callable[[], Any]]]:
        """By what is wrong: its error, the wrong call (last rank), the right one (all others)."""

        def right() -> None:
            ours.Allreduce(x, y)

        return {
            "non-contiguous": (ArgumentError, lambda: ours.Allreduce(strided, y), right),
            "read-only": (ArgumentError, lambda: ours.Allreduce(x, locked), right),
            "objects": (BufferTypeError, lambda: ours.Allreduce(objects, y), right),
            "root": (ArgumentError, lambda: ours.Bcast(y, root=n), lambda: ours.Bcast(y, root=0)),
            "unequal counts": (ArgumentError, lambda: ours.Allreduce(x[:50], y), right),
            "unknown op": (ArgumentError, lambda: ours.Allreduce(x, y, op="median"), right),
            "overlap": (ArgumentError, lambda: ours.Allreduce(y[:50], y[40:90]), right),
            "timeout": (ArgumentError, lambda: ours.Allreduce(x, y, timeout=-1), right),
            "non-blocking": (
                ArgumentError,
                lambda: ours.Iallreduce(x, locked).Wait(),
                lambda: ours.Iallreduce(x, y).Wait(),
            ),
            "exchange": (
                ArgumentError,
                lambda: ours.Reduce_scatter(x, locked[: 96 // n]),
                lambda: ours.Reduce_scatter(x, y[: 96 // n]),
            ),
        }

    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for what, (kind, wrong, right) in cases(ours).items():
            with pytest.raises(kind if last else RemoteError) as caught:
                (wrong if last else right)()
            if not last:
                assert f"rank {n - 1} failed: {kind.__name__}" in str(caught.value), what
            assert (x == np.arange(96.0)).all(), what
            assert (y == -1).all(), what
            ours.Allreduce(x, y)
            assert (y == n * x).all(), what
            y[:] = -1
        with pytest.raises(ArgumentError, match="median"):  # the same mistake everywhere is everybody's own
            ours.Allreduce(x, y, op="median")
        ours.Barrier()


@mpi(ranks=(3,), timeout=30)
def test_free_is_a_call_like_any_other(comm: MPI.Intracomm) -> None:
    """Whoever frees while others still call is told so, and does not hang."""
    ours = blinkmpi.Communicator(comm, timeout=10)
    with pytest.raises(MismatchError, match=r"rank 0: free\(\)"):
        (ours.Free if comm.rank == 0 else ours.Barrier)()


@mpi(ranks=(3,), timeout=30)
def test_who_leaves_the_block_by_an_error_is_heard(comm: MPI.Intracomm) -> None:

    def block() -> None:
        with blinkmpi.Communicator(comm, timeout=20) as ours:
            if comm.rank == 1:
                raise ZeroDivisionError
            ours.Barrier()

    since = time.monotonic()
    with pytest.raises(ZeroDivisionError if comm.rank == 1 else PeerLost):
        block()
    assert time.monotonic() - since < 5


# ---------------------------------------------------------------- smooth progress


@mpi(ranks=(8,), timeout=90)
def test_many_calls_on_an_oversubscribed_machine_progress(comm: MPI.Intracomm) -> None:
    sizes = (1, 1000, 50_000)
    with blinkmpi.Communicator(comm, timeout=30) as one, blinkmpi.Communicator(comm, timeout=30, runner="numpy") as two:
        since = time.monotonic()
        for i in range(500):
            x = np.full(sizes[i % 3], comm.rank + i, np.int64)
            y = np.empty_like(x)
            (one, two)[i % 2].Allreduce(x, y)
            assert y[0] == y[-1] == 28 + 8 * i
        assert time.monotonic() - since < 60


@mpi(ranks=(4,), timeout=60)
def test_two_threads_use_two_communicators(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI was not started with THREAD_MULTIPLE")
    wrong: list[object] = []

    def work(ours: blinkmpi.Communicator, offset: int) -> None:
        try:
            for i in range(150):
                x = np.full(10_000, float(comm.rank + i + offset))
                ours.Allreduce(MPI.IN_PLACE, x)
                if not (x == 6 + 4 * (i + offset)).all():
                    wrong.append((offset, i, x[0]))
        except BlinkError as error:
            wrong.append(error)

    algo = "allreduce:^mpi"
    with blinkmpi.Communicator(comm, timeout=20, algo=algo) as one, blinkmpi.Communicator(comm, timeout=20) as two:
        threads = [threading.Thread(target=work, args=(ours, k)) for k, ours in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


CASES: dict[str, Callable[..., None]] = {
    name.removeprefix("case_"): f for name, f in list(globals().items()) if name.startswith("case_")
}

if __name__ == "__main__":
    CASES[sys.argv[1]](*sys.argv[2:])
