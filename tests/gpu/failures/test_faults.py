"""GPU ranks that never come, die or disagree: every rank gets a typed error in time, and nothing hangs.

This file is also the program of a rank: ``python tests/gpu/failures/test_faults.py CASE [ARGUMENT...]``.
"""

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, DeviceError, MismatchError, PeerLost
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import DEVICES, GPUS, at_least, sizes
from tests.harness import NEVER_S, PATIENCE_S, Outcome, mpi
from tests.mpi import faults
from tests.mpi.faults import attempt, calls_until_death, finish, in_time, run_case, said, say, start_case

N = max(2, min(4, GPUS))
VICTIM = N - 1
OTHERS = list(range(N - 1))
DEADLINE = 3.0
BIG = 3 << 20  # elements: past all packets, and direct where buffers are registered
WAYS = {"packets": (100, False), "lines": (1 << 18, False), "slots": (BIG, False), "direct": (BIG, True)}

pytestmark = [pytest.mark.gpu, at_least(2)]


start = partial(start_case, __file__, n=N)


def lines_of(outcome: Outcome, key: str) -> dict[str, dict[int, Any]]:
    """What each rank has said under a key, by the way of the call that it was about."""
    found: dict[str, dict[int, Any]] = {}
    for way, part in re.findall(r"^#(\w+)$(.*?)(?=^#|\Z)", outcome.output, re.MULTILINE | re.DOTALL):
        found[way] = said(Outcome(0, part, 0.0, False, ()), key)
    return found


# ---------------------------------------------------------------- never comes


def test_a_rank_that_never_comes_is_named() -> None:
    with start("absent", timeout=len(WAYS) * (DEADLINE + PATIENCE_S) + 3 * PATIENCE_S) as job:
        outcome = finish(job)
    assert outcome.rc != 0
    kinds, texts, seconds = (lines_of(outcome, key) for key in ("error", "text", "seconds"))
    for way, (count, _) in WAYS.items():
        assert kinds.get(way) == dict.fromkeys(OTHERS, "CollectiveTimeout"), outcome.output
        for rank in OTHERS:
            assert DEADLINE - 0.5 < seconds[way][rank] < DEADLINE + PATIENCE_S, (way, rank)
            assert f"rank {VICTIM}" in texts[way][rank], (way, texts[way][rank])
            assert f"allreduce({count} x float32, op sum)" in texts[way][rank]
    assert lines_of(outcome, "again") == {way: dict.fromkeys(OTHERS, "PeerLost") for way in WAYS}


def case_absent() -> None:
    world, cp = MPI.COMM_WORLD, cupy()
    others = world.Split(world.rank == VICTIM)
    for way, (count, registered) in WAYS.items():
        comm = blinkmpi.Communicator(world)
        x, y = ((comm.empty if registered else cp.empty)(count, "float32") for _ in range(2))
        x[...] = 1
        comm.Allreduce(x, y)
        if comm.rank != VICTIM:
            others.Barrier()
            if comm.rank == 0:
                os.write(1, f"#{way}\n".encode())
            others.Barrier()
            attempt(lambda comm=comm, x=x, y=y: comm.Allreduce(x, y, timeout=DEADLINE))
            with pytest.raises(PeerLost, match="died earlier"):
                comm.Allreduce(x, y)
            say(again="PeerLost")
        world.Barrier()
    if world.rank == 0:
        world.Abort(3)  # the communicators would each wait for a rank that left them alive
    time.sleep(60)


# ---------------------------------------------------------------- killed


def test_a_killed_rank_ends_the_job() -> None:
    with start("killed") as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job)
    assert outcome.rc != 0


@pytest.mark.skipif(DEVICES < N, reason="of ranks that share a GPU by MPS, a killed one ends the others' server")
def test_under_fault_tolerance_the_others_hear_of_a_killed_rank() -> None:
    with start("killed", options=faults.fault_tolerance()) as job:
        job.wait_for('"ready"', count=N)
        outcome = finish(job)
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "PeerLost"), outcome.output
    in_time(outcome, OTHERS)
    assert all(f"rank {VICTIM} (process" in said(outcome, "text")[r] for r in OTHERS), outcome.output


def case_killed() -> None:
    """Allreduces of 64 MiB, in the middle of which one rank is killed."""
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    vector = cupy().zeros(16 << 20, "float32")
    comm.Allreduce(MPI.IN_PLACE, vector)
    comm.Barrier()
    say(ready=True)
    if comm.rank == VICTIM:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    calls_until_death(comm, vector, lambda: comm.Allreduce(MPI.IN_PLACE, vector))


# ---------------------------------------------------------------- disagreement


@mpi(ranks=sizes(2, 3, 4)[-1:], timeout=100)
def test_ranks_that_disagree_all_get_an_error(comm: MPI.Intracomm) -> None:
    """The last rank calls something else than the others; all of them hear of it, and nothing has been received."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm) as ours:  # which chooses this rank's GPU
        elsewhere = (comm.rank + 1) % n
        if n <= DEVICES:
            with cp.cuda.Device(elsewhere):
                other = cp.ones(8, "float32")
            with pytest.raises(BufferTypeError, match=f"GPU {elsewhere}"):
                ours.Allreduce(other, cp.empty(8, "float32"))
    last = comm.rank == n - 1
    Call = Callable[[blinkmpi.Communicator], object]
    x, y = cp.arange(BIG, dtype="float32"), cp.full(BIG, -1, "float32")
    long, host = cp.arange(BIG, dtype="float64"), np.ones(100, "float32")

    def right(count: int = 100) -> Call:
        return lambda ours: ours.Allreduce(x[:count], y[:count])

    def registered(ours: blinkmpi.Communicator) -> None:
        both = [ours.empty(BIG) for _ in range(2)]
        if last:
            ours.Allreduce(*both)
        else:
            ours.Allreduce(x, y)

    def broadcast(root: int) -> Call:
        """Of two roots neither waits for anybody; their next call fails."""

        def both(ours: blinkmpi.Communicator) -> None:
            ours.Bcast(y[:100], root=root)
            ours.Allreduce(x[:100], y[:100])

        return both

    def reduces(ours: blinkmpi.Communicator) -> None:
        """The first takes no data of the gather that its peer makes in its place, and then is a call ahead."""
        for root in (0, n - 1, 0):
            ours.Reduce(x[:100], y[:100] if ours.rank == root else None, root=root)

    def gather_first(ours: blinkmpi.Communicator) -> None:
        ours.Gather(x[:100], None, root=0)
        reduces(ours)

    pairs: dict[str, tuple[Call, Call]] = {
        "one call more": (gather_first, reduces),
        "root": (broadcast(n - 1), broadcast(0)),
        "count": (right(99), right()),
        "count of slots": (right(BIG - 1), right(BIG)),
        "op": (lambda ours: ours.Allreduce(x[:100], y[:100], MPI.MAX), right()),
        "type": (lambda ours: ours.Allreduce(long[:100], long[1000:1100]), right()),
        "collective": (lambda ours: ours.Bcast(y[:100], root=0), right()),
        "barrier": (lambda ours: ours.Barrier(), right()),
        "host memory": (lambda ours: ours.Allreduce(host, host.copy()), right()),
        "bad argument": (lambda ours: ours.Allreduce(x[:200:2], y[:100]), right()),
        "registered": (registered, registered),
    }
    for what, (odd, even) in pairs.items():
        ours = blinkmpi.Communicator(comm, timeout=NEVER_S)
        for name, root in itertools.product(("allreduce", "broadcast", "reduce", "gather"), (0, n - 1)):
            ours.plan(name, root)  # in a first call all meet on the host
        since = time.monotonic()
        with pytest.raises(BlinkError) as caught:
            (odd if last else even)(ours)
        seconds, error = time.monotonic() - since, caught.value
        told = comm.allgather((type(error).__name__, str(error)))
        if last and what == "bad argument":
            assert isinstance(error, ArgumentError), what
        else:
            assert isinstance(error, MismatchError | PeerLost), (what, told)
        assert any(kind == "MismatchError" for kind, _ in told), (what, told)
        assert seconds < PATIENCE_S, (what, seconds)
        assert (y == -1).all(), what
        dispatcher = ours._dispatcher()  # whoever may go on must not wait for those who may not
        dispatcher.sequence.dead = dispatcher.sequence.dead or error
        ours.Free()
    with blinkmpi.Communicator(comm) as ours:
        ours.Allreduce(x, y)
        assert (y == n * x).all()


@mpi(ranks=(2,), timeout=60)
def test_bad_arguments(comm: MPI.Intracomm) -> None:
    """The same mistake on every rank is everybody's own error, and the communicator lives on."""
    cp = cupy()
    with blinkmpi.Communicator(comm, timeout=20) as ours:  # which chooses this rank's GPU
        x, y, host = cp.arange(96, dtype="float32"), cp.full(96, -1, "float32"), np.ones(96, "float32")
        wrong: dict[str, tuple[type[BlinkError], Callable[[], object]]] = {
            "no such operation for the type": (BufferTypeError, lambda: ours.Allreduce(x, y, "band")),
            "unknown operation": (ArgumentError, lambda: ours.Allreduce(x, y, "median")),
            "types differ": (ArgumentError, lambda: ours.Allreduce(x, y.view("int32"))),
            "counts differ": (ArgumentError, lambda: ours.Allreduce(x[:50], y)),
            "no whole blocks": (ArgumentError, lambda: ours.Reduce_scatter_block(x[:95], y)),
            "not contiguous": (ArgumentError, lambda: ours.Allreduce(x[::2], y[:48])),
            "overlap": (ArgumentError, lambda: ours.Allreduce(x[:50], x[40:90])),
            "two memories": (BufferTypeError, lambda: ours.Allreduce(host, y)),
            "a stream for host memory": (ArgumentError, lambda: ours.Allreduce(host, host.copy(), stream=0)),
            "no stream": (ArgumentError, lambda: ours.Allreduce(x, y, stream="main")),
            "root": (ArgumentError, lambda: ours.Bcast(y, root=2)),
            "timeout": (ArgumentError, lambda: ours.Allreduce(x, y, timeout=-1)),
            "not blocking": (ArgumentError, lambda: ours.Iallreduce(x[:50], y).Wait()),
            "register host memory": (BufferTypeError, lambda: ours.register(host)),
            "deregister what is not": (BufferTypeError, lambda: ours.deregister(x)),
            "persistent": (ArgumentError, lambda: ours.Allreduce_init(x[:50], y)),
        }
        for what, (kind, call) in wrong.items():
            with pytest.raises(kind) as caught:
                call()
            assert len(str(caught.value)) < 600, what
            assert (y == -1).all(), what
            ours.Allreduce(x, y)
            assert (y == 2 * x).all(), what
            y[...] = -1


@mpi(ranks=(2,), timeout=60, env={"BLINKMPI_GPU_DISABLE": "1"})
def test_gpus_that_are_disabled(comm: MPI.Intracomm) -> None:
    x, host = cupy().ones(10, "float32"), np.ones(10, "float32")
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        assert ours.gpu is None
        for call in (lambda: ours.Allreduce(x, x.copy()), lambda: ours.Ibcast(x).Wait()):
            with pytest.raises(BufferTypeError, match="BLINKMPI_GPU_DISABLE is set"):
                call()
        for call in (lambda: ours.empty(10), lambda: ours.register(x)):
            with pytest.raises(DeviceError, match="BLINKMPI_GPU_DISABLE is set"):
                call()
        ours.Allreduce(MPI.IN_PLACE, host)
        assert (host == 2).all()


if __name__ == "__main__":
    run_case(globals())
