"""Short calls on ranks that share a memory: data and announcement in one meeting, and errors as in every call."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import MismatchError
from blinkmpi.runtime.inspection import choice
from tests.harness import mpi
from tests.mpi.short.errors import rank_0_is_late, rank_1_refuses


@mpi(ranks=(2, 3, 4), timeout=60)
def test_short_calls_of_different_lengths_follow_one_another(comm: MPI.Intracomm) -> None:
    """In one shot a rank fills its slots while a slow one may still read those of the call before."""
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm) as ours:
        assert choice(ours.context, "allreduce", 64)["protocol"] in ("one_shot", "slots")
        counts = [1, 7, 4000, 16, 2, 1000, 3]
        sends = [np.empty(count, np.int64) for count in counts]
        sums, all_of = [np.empty_like(x) for x in sends], [np.empty(n * x.size, np.int64) for x in sends]
        for i in range(60):
            for x, y, z in zip(sends, sums, all_of, strict=True):
                x[:] = i * n + rank
                ours.Allreduce(x, y)
                assert (y == sum(i * n + r for r in range(n))).all()
                ours.Allgather(x, z)
                assert (z.reshape(n, -1) == i * n + np.arange(n)[:, None]).all()
                if (i + rank) % 7 == 0:
                    time.sleep(0.0005)
                ours.Bcast(x, root=i % n)
                assert (x == i * n + i % n).all()


@mpi(ranks=(2, 4), timeout=60)
def test_a_call_that_c_has_begun_ends_in_the_same_errors(comm: MPI.Intracomm) -> None:
    """Ranks that make different known calls, one that refuses, one that does not come."""
    with blinkmpi.Communicator(comm) as ours:
        x, y, z = np.ones(50, np.float32), np.empty(50, np.float32), np.ones(9, np.float32)
        for _ in range(3):
            ours.Allreduce(x, y)
            ours.Bcast(z)
            ours.Barrier()
        for other in (lambda: ours.Bcast(z), ours.Barrier):
            with pytest.raises(MismatchError, match="allreduce"):
                other() if comm.rank == 0 else ours.Allreduce(x, y)
            ours.Allreduce(x, y)
            assert (y == comm.size).all()
        rank_1_refuses(ours, x, y, z)
    rank_0_is_late(comm, blinkmpi.Communicator(comm, timeout=2), x, y)


@mpi(ranks=(4,), timeout=60)
def test_what_is_copied_first_may_be_read_at_once(comm: MPI.Intracomm) -> None:
    """In place, others read a copy of the operand; they may as soon as they have heard of the call."""
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm) as ours:
        for turn in range(30):
            count = 20_000 + 3001 * turn
            given = [(np.arange(count * n) * 7 + rank * 1000 + turn + j).astype("int32") for j in range(3)]
            MPI.Request.Waitall([ours.Ialltoall(MPI.IN_PLACE, x) for x in given])
            junk = np.full(count * n, -1, "int32")  # where memory is given back too early
            for j, x in enumerate(given):
                own = np.arange(rank * count, (rank + 1) * count) * 7 + turn + j
                for r, block in enumerate(np.split(x, n)):
                    assert (block == own + r * 1000).all(), (turn, j, r)
            assert junk[0] == -1


@mpi(ranks=(2, 3), timeout=60, env={"BLINKMPI_CMA_DISABLE": "1"})
def test_types_that_mpi_has_not_where_others_are_left_to_mpi(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for count in (100, 30_000, 150_000, 2_000_000):
            x = np.full(count, ours.rank + 1, np.float16)
            ours.Bcast(x)
            assert (x == 1).all()
            y = np.zeros(count, np.float16)
            ours.Reduce(x, y if ours.rank == 0 else None)
            assert ours.rank or (y == ours.size).all()


@mpi(ranks=(2, 3), timeout=60)
def test_types_that_c_has_not_go_through_slots_where_they_are_long(comm: MPI.Intracomm) -> None:
    """Exscan of two ranks is one shot by cma at any length, and of complex numbers nothing goes by cma."""
    with blinkmpi.Communicator(comm) as ours:
        for count in (10, 5000, 70_000):
            x, y = np.full(count, ours.rank + 1, np.complex64), np.zeros(count, np.complex64)
            ours.Exscan(x, y)
            assert ours.rank == 0 or (y == sum(range(1, ours.rank + 1))).all()
            ours.Scan(x, y)
            assert (y == sum(range(1, ours.rank + 2))).all()
