"""Ranks that stop, die, leave or never come: the others hear of it in time, in words, and nothing is left behind.

Who is only slow is waited for. This file is also the program of a rank:
``python tests/mpi/test_faults.py CASE [ARGUMENT...]``.
"""

import atexit
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import blinkmpi
from blinkmpi.errors import BlinkError
from blinkmpi.runtime.calls_without_program import MpiCall
from blinkmpi.transport.host import host_call
from blinkmpi.transport.host.host_call import HostCall
from tests.harness import NEVER_S, Outcome, mpi
from tests.mpi import faults
from tests.mpi.faults import (
    EXECUTORS,
    VICTIM,
    N,
    attempt,
    calls_until_death,
    finish,
    in_time,
    meet,
    run_case,
    said,
    say,
    start_case,
)

pytestmark = pytest.mark.usefixtures("nothing_left_in_shared_memory")
start = partial(start_case, __file__)


# ---------------------------------------------------------------- stopped or killed

# by each executor and by MPI; amid cma, where the victim reads and is read, reads alone, is read
BIG = [("big", how) for how in (*EXECUTORS, "mpi")]
EXPORTED = [
    ("exported", *call) for call in (("Allgather", "-1"), ("Allreduce", "-1"), ("Bcast", "0"), ("Bcast", f"{VICTIM}"))
]
BLOCKS = [("blocks", how) for how in ("cma", "chunks")]
ways = pytest.mark.parametrize("way", [
    *(pytest.param(way, id="-".join(way)) for way in (*BIG, *EXPORTED[:1], *BLOCKS[:1])),
    *(pytest.param(way, id="-".join(way), marks=pytest.mark.long) for way in (*EXPORTED[1:], *BLOCKS[1:])),
])  # fmt: skip
OTHERS = [r for r in range(N) if r != VICTIM]


def struck(way: tuple[str, ...], timeout: float, signum: str, options: tuple[str, ...] = ()) -> Outcome:
    """A job in which the victim gets a signal amid a call."""
    with start(*way, str(timeout), signum, options=options) as job:
        job.wait_for('"ready"', count=N)
        return finish(job)


@ways
def test_a_stopped_rank_is_named_within_the_deadline(way: tuple[str, ...]) -> None:
    deadline = 3.0
    outcome = struck(way, deadline, "SIGSTOP")
    assert outcome.rc != 0  # MPI_Finalize would have waited for ever
    pid = said(outcome, "pid")[VICTIM]
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "CollectiveTimeout")
    in_time(outcome, OTHERS, deadline)
    for rank in OTHERS:
        text = said(outcome, "text")[rank]
        assert f"rank {VICTIM} (process {pid}) is stopped" in text
        if way[0] == "big":
            assert "allreduce" in text
            assert re.search(r"chunk \d+ of \d+ of tree \d+" if way[1] != "mpi" else "its part of MPI's own", text)
            assert len(text) < 500
    assert {r: said(outcome, "again").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "PeerLost")
    assert {r: said(outcome, "left").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, True)
    assert "ends the job, or MPI_Finalize would wait for ever" in outcome.output


@ways
def test_a_killed_rank_ends_the_job(way: tuple[str, ...]) -> None:
    assert struck(way, NEVER_S, "SIGKILL").rc != 0


@ways
def test_under_fault_tolerance_the_others_hear_of_a_killed_rank(way: tuple[str, ...]) -> None:
    outcome = struck(way, NEVER_S, "SIGKILL", faults.fault_tolerance())
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "PeerLost"), outcome.output
    in_time(outcome, OTHERS)
    assert all(f"rank {VICTIM} (process" in said(outcome, "text")[r] for r in OTHERS)
    assert said(outcome, "left") == dict.fromkeys(OTHERS, True)


def case_big(how: str, timeout: str, signal_name: str) -> None:
    """A 256 MiB Allreduce, in the middle of which one rank gets a signal."""
    algo, executor = ("allreduce:mpi", None) if how == "mpi" else (None, how)
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo=algo, executor=executor) as comm:
        vector = np.ones(64 << 20, np.float32)
        comm.Allreduce(MPI.IN_PLACE, vector)
        if comm.rank == VICTIM:
            signal_amid_a_call(comm, signal.Signals[signal_name])
        say(ready=True, pid=os.getpid())
        calls_until_death(comm, vector)
    leave(signal_name)


def leave(signal_name: str) -> None:
    """The last of a rank; where one is stopped, the first of the others that leaves ends the job."""
    say(left=True)
    if signal_name == "SIGSTOP":
        meet(*OTHERS)


def signal_amid_a_call(comm: blinkmpi.Communicator, signum: signal.Signals) -> None:
    """Make this process signal itself 20 ms after it has begun to move data."""
    comm._dispatcher().repeated.shut()  # C would make the call without Python

    def late(work: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any, **named: Any) -> Any:
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signum)).start()
            return work(*args, **named)

        return begun

    HostCall.run = late(HostCall.run)  # type: ignore[method-assign]
    MpiCall._complete = late(MpiCall._complete)  # type: ignore[method-assign]


def case_exported(method: str, root: str, timeout: str, signal_name: str) -> None:
    """256 MiB by cma, in the middle of which one rank gets a signal."""
    algo = "broadcast:direct;allgather:direct;allreduce:direct"
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo=algo, executor="c") as comm:
        context = comm.context
        long = ("cma", "slots")
        by_cma = partial(map, lambda rule: replace(rule, protocol="cma"))
        context.planned.change(lambda p: replace(p, rules=tuple(by_cma(r for r in p.rules if r.protocol in long))))
        vector = np.ones(64 << 20, np.float32)
        arguments = (vector, int(root)) if method == "Bcast" else (MPI.IN_PLACE, vector)
        getattr(comm, method)(*arguments)
        assert all(program.cma for _, program in comm._dispatcher().binder.programs.values() if program)
        if comm.rank == VICTIM:
            signal_amid_a_call(comm, signal.Signals[signal_name])
        say(ready=True, pid=os.getpid())
        calls_until_death(comm, vector, lambda: getattr(comm, method)(*arguments))
    leave(signal_name)


def case_blocks(how: str, timeout: str, signal_name: str) -> None:
    """256 MiB of an Allgatherv, in the middle of which one rank gets a signal."""
    os.environ["BLINKMPI_CMA_DISABLE"] = str(int(how == "chunks"))
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), executor="c") as comm:
        vector = np.ones(64 << 20, np.float32)
        counts = [vector.size // N - r for r in range(N)]
        everything = [vector, (counts, [sum(counts[:r]) for r in range(N)])]
        comm.Allgatherv(MPI.IN_PLACE, everything)
        if comm.rank == VICTIM:
            signal_amid_a_call(comm, signal.Signals[signal_name])
        say(ready=True, pid=os.getpid())
        calls_until_death(comm, vector, lambda: comm.Allgatherv(MPI.IN_PLACE, everything))
    leave(signal_name)


# ---------------------------------------------------------------- never comes


def test_a_rank_that_never_comes_is_named() -> None:
    with start("absent", "sleep", "1.5") as job:
        outcome = finish(job)
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "CollectiveTimeout")
    in_time(outcome, OTHERS, 1.5)
    for rank in OTHERS:
        text = said(outcome, "text")[rank]
        assert re.search(rf"rank {VICTIM} \(process \d+\) runs, last entered call 2 barrier\(\)", text), text
        assert "call 3, allreduce(8 x float64, op sum)" in text


@pytest.mark.parametrize("how", ["exit0", "exit3", "end"])
def test_a_rank_that_left_is_noticed_long_before_the_deadline(how: str) -> None:
    with start("absent", how, str(NEVER_S)) as job:
        outcome = finish(job)
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "PeerLost")
    in_time(outcome, OTHERS)
    for rank in OTHERS:
        text = said(outcome, "text")[rank]
        gone = "has (left|dropped its communicator, which it did not free)"  # whichever the others see first
        assert re.search(rf"rank {VICTIM} \(process \d+\) {gone}.*last entered call 2 barrier\(\)", text), text
    assert (outcome.rc == 0) == (how != "exit3"), outcome.output  # all have left: MPI_Finalize does not hang


def test_a_rank_that_comes_late_hears_that_it_is_too_late() -> None:
    """And all of them can end in peace."""
    with start("absent", "late", "2") as job:
        outcome = finish(job)
    assert said(outcome, "error") == dict.fromkeys(range(N), "CollectiveTimeout")
    in_time(outcome, OTHERS, 2)
    in_time(outcome, [VICTIM])
    assert outcome.rc == 0, outcome.output


def case_absent(how: str, timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD)  # with its own deadline: on a busy machine it takes seconds
    comm.Barrier()
    comm.Barrier()
    if comm.rank == VICTIM:
        if how == "end":
            return
        if how.startswith("exit"):
            sys.exit(int(how.removeprefix("exit")))
        if how == "sleep":
            time.sleep(NEVER_S)
        meet(*range(N))  # all others have given up: it need not wait for its own deadline to hear of it
    own = NEVER_S if comm.rank == VICTIM else float(timeout)
    attempt(lambda: comm.Allreduce(np.ones(8), np.empty(8), timeout=own))
    if comm.rank != VICTIM and how in ("sleep", "late"):
        meet(*(OTHERS if how == "sleep" else range(N)))
    comm.Free()


def test_a_rank_may_leave_when_it_has_done_its_part() -> None:
    """Ranks 1 and 2 are gone while the root still waits for rank 3."""
    with start("early", "20") as job:
        outcome = finish(job)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "total") == {0: float(N)}


def case_early(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), algo="reduce:^mpi", executor="numpy")
    if comm.rank == N - 1:
        run = host_call.step_numpy

        def slow(*args: Any) -> Any:  # it has come, but does not go on
            time.sleep(1.0)
            return run(*args)

        host_call.step_numpy = slow
    total = np.zeros(100)
    comm.Reduce(np.ones(100), total if comm.rank == 0 else None, root=0)
    if comm.rank == 0:
        say(total=float(total[50]))


@pytest.mark.parametrize("how", ["exit", "exception"])
def test_how_a_child_of_a_rank_ends_is_no_matter_of_the_jobs(how: str) -> None:
    with start("child", how) as job:
        outcome = finish(job)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "total") == dict.fromkeys(range(N), float(N)), outcome.output


def case_child(how: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=10)
    comm.Barrier()
    if comm.rank == VICTIM:
        child = os.fork()
        if child == 0:  # as Python ends, but for MPI_Finalize, which hangs in a child, with or without us
            if how == "exception":
                sys.excepthook(ValueError, ValueError("in the child"), None)
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1.0)  # the others wait, and look whether this rank is still there
    total = np.empty(1000)
    for _ in range(3):
        comm.Barrier()
        comm.Allreduce(np.ones(1000), total)
    say(total=float(total[0]))


# ---------------------------------------------------------------- smooth progress


@mpi((), long=(8,), timeout=180)
def test_many_calls_on_an_oversubscribed_machine_progress(comm: MPI.Intracomm) -> None:
    """Each within its deadline; none waits for a core that another rank holds."""
    sizes = (1, 1000, 50_000)
    with (
        blinkmpi.Communicator(comm, timeout=30) as one,
        blinkmpi.Communicator(comm, timeout=30, executor="numpy") as two,
    ):
        for i in range(500):
            x = np.full(sizes[i % 3], comm.rank + i, np.int64)
            y = np.empty_like(x)
            (one, two)[i % 2].Allreduce(x, y)
            assert y[0] == y[-1] == 28 + 8 * i


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


if __name__ == "__main__":
    run_case(globals())
