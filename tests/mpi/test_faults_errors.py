"""Ranks that raise, are interrupted or disagree: all the others hear of it, in words, and none waits for ever.

This file is also the program of a rank: ``python tests/mpi/test_faults_errors.py CASE [ARGUMENT...]``.
"""

import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RemoteError,
)
from blinkmpi.runtime.collectives import Invocation
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import ON_GPU, Called, Numbers
from tests.harness import NEVER_S, PATIENCE_S, mpi
from tests.mpi.faults import (
    EXECUTORS,
    VICTIM,
    N,
    attempt,
    fault_tolerance,
    finish,
    in_time,
    meet,
    run_case,
    said,
    say,
    start_case,
    when_it_enters,
)

pytestmark = pytest.mark.usefixtures("nothing_left_in_shared_memory")
start = partial(start_case, __file__)


@contextmanager
def after_the_others(comm: MPI.Intracomm, victim: int) -> Iterator[None]:
    """One rank comes to a call when the others have given it up."""
    if comm.rank == victim:
        comm.Barrier()
    yield
    if comm.rank != victim:
        comm.Barrier()


@pytest.mark.parametrize("executor", EXECUTORS)
@mpi(ranks=(3,), timeout=60)
def test_a_rank_that_comes_late_and_finds_all_it_needs_hears_it_too(comm: MPI.Intracomm, executor: str) -> None:
    """The root of the only tree has the sum at once; but its peers have raised."""
    star = modify(machine("dgx-1v"), gpus="0,3,4")
    x = np.ones(8)
    for victim in range(comm.size):
        ours = blinkmpi.Communicator(comm, topology=star, algo="allreduce:trees", executor=executor)
        ours.Allreduce(x, np.empty(8))
        comm.Barrier()
        with after_the_others(comm, victim), pytest.raises(CollectiveTimeout):
            ours.Allreduce(x, np.empty(8), timeout=0.4)
        ours.Free()
        comm.Barrier()


@pytest.mark.parametrize("executor", EXECUTORS)
@mpi(ranks=(3,), timeout=60)
def test_a_rank_that_comes_late_to_a_barrier_hears_it_too(comm: MPI.Intracomm, executor: str) -> None:
    for victim in range(comm.size):
        ours = blinkmpi.Communicator(comm, executor=executor)
        ours.Barrier()
        comm.Barrier()
        with after_the_others(comm, victim), pytest.raises(CollectiveTimeout):
            ours.Barrier(timeout=0.4)
        ours.Free()
        comm.Barrier()


# ---------------------------------------------------------------- a peer that waits on its GPU, or goes on


@pytest.mark.parametrize("then", ["on_gpu", "on_host"])
@pytest.mark.parametrize("first", ["exchange", "barrier"])
@mpi(ranks=(2, 3), timeout=60)
def test_a_record_is_used_again_when_all_have_read_it(comm: MPI.Intracomm, first: str, then: str) -> None:
    """A call on a stream waits for nobody: rank 0 is two calls on while others still look at what it called."""
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        dispatcher, host = ours._blink, ours.context.host
        wait = host._wait

        def late(seq: int, timeout_s: float) -> None:
            wait(seq, timeout_s)
            time.sleep(0.3)

        def on_gpu(count: int) -> None:
            called = Called(f"allreduce({count} x float32, op sum){ON_GPU}")
            dispatcher.sequence.seq += 1
            host.records.announce_kernel(dispatcher.sequence.seq, *host.records.encode(called), 30.0)

        for parity in range(2):
            if comm.rank:
                host._wait = late  # type: ignore[method-assign]
            dispatcher.sequence.seq += 1
            if first == "exchange":
                told = host.exchange(dispatcher.sequence.seq, Numbers((comm.rank, 7)), 30.0)
                assert told == tuple((r, 7) for r in range(comm.size))
            else:
                host.barrier(dispatcher.sequence.seq, Called("it"), 30.0)
            host._wait = wait  # type: ignore[method-assign]
            on_gpu(8 + parity)
            if then == "on_gpu":
                on_gpu(80 + parity)
            else:
                ours.Allreduce(MPI.IN_PLACE, x := np.full(800 + parity, comm.rank))
                assert (x == sum(range(comm.size))).all()


@mpi(ranks=(2, 3), timeout=60)
def test_a_host_call_beside_a_gpu_call_ends_the_communicator_for_both(comm: MPI.Intracomm) -> None:
    """The kernels of the GPU call would wait until the deadline: their host looks at the peers now and then."""
    ours = blinkmpi.Communicator(comm, timeout=30)
    host = ours.context.host
    began = time.monotonic()
    if comm.rank == 0:  # as a call on GPU memory does
        called = Called(f"allreduce(8 x float32, op sum){ON_GPU}")
        host.records.announce_kernel(1, *host.records.encode(called), 30.0)
        while (error := host.peers.mismatch_so_far(1, called.text)) is None:
            assert time.monotonic() - began < PATIENCE_S, "nothing is heard of the other call"
            time.sleep(0.01)
    else:
        with pytest.raises(MismatchError, match="in GPU memory") as caught:
            ours.Barrier()
        error = caught.value
        with pytest.raises(PeerLost, match="died earlier"):
            ours.Barrier()
    assert isinstance(error, MismatchError | PeerLost)
    comm.Barrier()


# ---------------------------------------------------------------- errors and interrupts


def test_an_error_on_one_rank_ends_the_job() -> None:
    with start("raises", str(NEVER_S)) as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job)
    assert outcome.rc != 0
    assert "ValueError: seven is not eight" in outcome.output


def test_a_communicator_that_one_rank_revokes_is_dead_on_all() -> None:
    with start("revokes", options=fault_tolerance()) as job:
        outcome = finish(job)
    assert said(outcome, "error") == dict.fromkeys(range(N), "PeerLost"), outcome.output
    in_time(outcome, range(N))


def case_revokes() -> None:
    """The others wait in a call, which MPI's own revocation does not reach."""
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    comm.Barrier()
    if comm.rank == VICTIM:
        time.sleep(0.5)
        comm.Revoke()
    vector = np.ones(1000)
    attempt(lambda: comm.Allreduce(MPI.IN_PLACE, vector))
    comm.Free()


def case_raises(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout))
    comm.Barrier()
    say(ready=True)
    if comm.rank == 1:
        raise ValueError("seven is not eight")
    comm.Barrier()


def test_an_uncaught_timeout_ends_the_job() -> None:
    with start("uncaught", "1") as job:
        outcome = finish(job)
    assert outcome.rc != 0
    assert "CollectiveTimeout: call 1, barrier(): rank 2" in outcome.output


def case_uncaught(timeout: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout))
    if comm.rank == VICTIM:
        time.sleep(NEVER_S)
    comm.Barrier()


@pytest.mark.parametrize("how", [*EXECUTORS, "mpi"])
def test_an_interrupt_is_raised_in_the_call_and_heard_by_the_others(how: str) -> None:
    with start("interrupt", how, str(NEVER_S)) as job:
        job.wait_for('"entered"')
        job.signal(1, signal.SIGINT)
        outcome = finish(job)
    assert outcome.rc != 0
    assert said(outcome, "error") == {1: "KeyboardInterrupt", 3: "PeerLost"}
    assert "rank 1 (process" in said(outcome, "text")[3]
    assert "gave up with KeyboardInterrupt;" in said(outcome, "text")[3]
    assert re.search(r"^KeyboardInterrupt$", outcome.output, re.MULTILINE), outcome.output


def case_interrupt(how: str, timeout: str) -> None:
    """Ranks 0 and 2 do not come, or come and do not go on; rank 1 is interrupted; rank 3 hears of it."""
    algo, executor = ("allreduce:mpi", None) if how == "mpi" else (None, how)
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=float(timeout), executor=executor, algo=algo)
    comm.Barrier()
    if comm.rank in (0, 2):
        if how == "mpi":  # they enter the call, but not MPI's part of it
            Invocation.begin = lambda *_: time.sleep(NEVER_S)  # type: ignore[assignment, method-assign]
            comm.Allreduce(np.ones(8), np.empty(8))
        time.sleep(NEVER_S)
    if comm.rank == 1:
        when_it_enters(comm, lambda: say(entered=True))
    error = attempt(lambda: comm.Allreduce(np.ones(8), np.empty(8)))
    meet(1, 3)
    if comm.rank == 1 and error is not None:
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

    for executor in EXECUTORS:
        with blinkmpi.Communicator(comm, timeout=20, executor=executor) as ours:
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
    n, last, part = comm.size, comm.rank == comm.size - 1, 96 // comm.size
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
                lambda: ours.Reduce_scatter(x, locked[:part]),
                lambda: ours.Reduce_scatter(x, y[:part]),
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


@mpi(ranks=(2,), timeout=60)
def test_what_a_rank_raised_before_it_frees_is_shown_too(comm: MPI.Intracomm) -> None:

    def block() -> None:
        ours = blinkmpi.Communicator(comm)
        try:
            if comm.rank == 0:
                raise ZeroDivisionError("a mistake of the user's own")
            ours.Barrier()
        finally:
            ours.Free()

    with pytest.raises(MismatchError) as caught:
        block()
    assert comm.rank == 1 or "a mistake of the user's own" in "".join(traceback.format_exception(caught.value))


@mpi(ranks=(3,), timeout=60)
def test_who_leaves_the_block_by_an_error_is_heard(comm: MPI.Intracomm) -> None:

    def block() -> None:
        with blinkmpi.Communicator(comm, timeout=NEVER_S) as ours:
            if comm.rank == 1:
                raise ZeroDivisionError
            ours.Barrier()

    since = time.monotonic()
    with pytest.raises(ZeroDivisionError if comm.rank == 1 else PeerLost):
        block()
    assert time.monotonic() - since < PATIENCE_S


if __name__ == "__main__":
    run_case(globals())
