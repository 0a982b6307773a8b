"""Calls made again on the same NumPy arrays: settled once, and still checked and right each time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, CollectiveTimeout, MismatchError
from tests.harness import mpi

OURS = "allreduce:^mpi;broadcast:^mpi;allgather:^mpi;reduce_scatter:^mpi;reduce:^mpi"
COUNT = 3000


def settled(comm: blinkmpi.Communicator) -> int:
    """How many calls are remembered."""
    return len(comm._engine()._made)


@pytest.mark.parametrize("algo", [OURS, None])
@pytest.mark.parametrize("executor", ["auto", "numpy"])
@mpi(ranks=(1, 2, 3), timeout=60)
def test_content_counts_each_time(comm: MPI.Intracomm, algo: str | None, executor: str) -> None:
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=algo, executor=executor) as ours:
        x, y, whole = np.empty(COUNT), np.empty(COUNT), np.empty(n * COUNT)
        inside, block = np.empty(n * 10), np.empty(10)
        for i in range(5):
            x[:] = rank + i
            ours.Allreduce(x, y)
            assert (y == sum(r + i for r in range(n))).all()
            ours.Allgather(x, whole)
            assert (whole.reshape(n, COUNT) == np.arange(n)[:, None] + i).all()
            ours.Bcast(x, root=n - 1)
            assert (x == n - 1 + i).all()
            inside[:] = rank * i
            ours.Reduce_scatter_block(MPI.IN_PLACE, inside)
            assert (inside[:10] == sum(r * i for r in range(n))).all()
            inside[:] = i
            ours.Reduce_scatter(inside, block)  # whose lengths the ranks exchange
            assert (block == n * i).all()
            ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
            assert (x == n - 1 + i).all()
        if ours.executor.startswith("C executor"):
            assert settled(ours) >= 4


@pytest.mark.parametrize("executor", ["auto", "numpy"])
@mpi(ranks=(2, 3), timeout=60)
def test_reduce_scatters_in_place_of_growing_length(comm: MPI.Intracomm, executor: str) -> None:
    """They share memory that results are received into, which a longer one replaces while others are under way."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=OURS, executor=executor) as ours:
        buffers = [np.empty(n * count) for count in (10, 300, 20_000)]
        for i in range(12):
            some = buffers[: 1 + i // 4]
            for x in some:
                x[:] = rank + i
            requests = [ours.Ireduce_scatter_block(MPI.IN_PLACE, x) for x in (some if i % 2 else some[:0])]
            MPI.Request.Waitall(requests)
            for x in some:
                if not requests:
                    ours.Reduce_scatter_block(MPI.IN_PLACE, x)
                block = x.size // n
                assert (x[:block] == sum(r + i for r in range(n))).all()
                assert (x[block:] == rank + i).all()


@mpi(ranks=(2, 3), timeout=60)
def test_one_rank_may_take_other_buffers(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x, y = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
        for i in range(4):
            if i % 2 and comm.rank == 0:
                other = np.full(COUNT, 1, np.float32)
                ours.Allreduce(other, y)
            else:
                ours.Allreduce(x, y)
            assert (y == comm.size).all(), i


@mpi(ranks=(1, 2), timeout=60)
def test_the_c_executor_alone_makes_a_call_from_the_third_time_on(comm: MPI.Intracomm) -> None:
    """Records are of two calls by turns: before, this rank has not told the others of this one in both."""
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        transport = ours._engine().transport
        ends: list[bool | None] = []
        before = transport.again
        transport.again = lambda made, seq: ends.append(before(made, seq)) or ends[-1]  # type: ignore[method-assign, func-returns-value]
        x, y, other = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32), np.empty(7)
        for i in range(6):
            x[:] = i
            ours.Allreduce(x, y)
            assert (y == comm.size * i).all()
        assert ends == [None, True, True, True, True]
        ours.Bcast(other)
        for _ in range(3):
            ours.Allreduce(x, y)
        assert ends[5:] == [True, None, True]


@mpi(ranks=(2,), timeout=60)
def test_a_repeated_call_keeps_its_deadline(comm: MPI.Intracomm) -> None:
    """C waits a slice of it before anybody looks after the peers."""
    ours = blinkmpi.Communicator(comm, algo=OURS, timeout=0.5)
    x, y = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    for _ in range(4):
        ours.Allreduce(x, y)
    comm.Barrier()
    if comm.rank == 0:
        since = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            ours.Allreduce(x, y)
        assert 0.45 <= time.monotonic() - since < 0.69, "half a second, and no slice of 0.2 s more"
    comm.Barrier()
    if comm.rank == 1:
        with pytest.raises(CollectiveTimeout, match="rank 0"):
            ours.Allreduce(x, y)
    ours.Free()


@mpi(ranks=(2, 3), timeout=60)
def test_what_is_wrong_is_still_heard(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x, y = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
        ours.Allreduce(x, y)
        ours.Allreduce(x, y)
        part = slice(0, COUNT - 1 if comm.rank == 0 else COUNT)
        with pytest.raises(MismatchError):
            ours.Allreduce(x[part], y[part])
        y.setflags(write=False)
        with pytest.raises(BlinkError, match="read-only"):
            ours.Allreduce(x, y)
        y.setflags(write=True)
        swapped = x.view(x.dtype.newbyteorder())
        with pytest.raises(BlinkError, match="byte order"):
            ours.Allreduce(swapped, y)
        ours.Allreduce(x, y)
        assert (y == comm.size).all()
        changes = ours.replan()
        assert all(change.what for change in changes)
        assert settled(ours) == 0
        ours.Allreduce(x, y)
        assert (y == comm.size).all()
