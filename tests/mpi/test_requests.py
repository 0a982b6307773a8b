"""Non-blocking calls: requests, their order, their buffers and errors, and computing meanwhile."""

import gc
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import MismatchError
from tests.harness import mpi
from tests.mpi.test_conformance import OURS


@mpi(ranks=(1, 3))
def test_requests(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x = np.zeros(1000, np.int64)
        request = ours.Iallreduce(np.full(1000, rank), x)
        assert isinstance(request, MPI.Request)
        assert request.Wait() is True
        assert request == MPI.REQUEST_NULL
        assert (x == n * (n - 1) // 2).all()
        request = ours.Ibarrier()
        while not request.Test():
            pass
        assert ours.Ibarrier().wait() is None
        request = ours.Ibarrier()
        while not (answer := request.test())[0]:
            pass
        assert answer == (True, None)

        token = np.zeros(1, np.int64)
        mixed = [
            ours.Ibcast(x),
            comm.Isend(np.array([rank]), (rank + 1) % n),
            comm.Irecv(token, (rank - 1) % n),
            ours.Iallreduce(MPI.IN_PLACE, x),
        ]
        MPI.Request.Waitall(mixed)
        assert token == (rank - 1) % n
        assert (x == n * (n * (n - 1) // 2)).all()
        some = [ours.Ibarrier(), comm.Ibarrier(), ours.Ibarrier()]
        assert sorted(MPI.Request.Waitany(some) for _ in some) == [0, 1, 2]
        rest = [ours.Ibarrier(), comm.Ibarrier()]
        while not MPI.Request.Testall(rest):
            time.sleep(0)
        ours.Ibarrier().Free()  # MPI lets a user give a request up


@mpi(ranks=(2, 4))
def test_many_outstanding(comm: MPI.Intracomm) -> None:
    """They run in their order, and a blocking call behind them."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        sizes = [(37 * i * i) % 50021 for i in range(50)]
        data = [np.full(size, rank + i, np.float64) for i, size in enumerate(sizes)]
        requests = [ours.Iallreduce(MPI.IN_PLACE, x) for x in data]
        last = np.zeros(1)
        ours.Allreduce(np.ones(1), last)
        assert all(r.Test() for r in requests), "the blocking call overtook"
        assert last == n
        for i, x in enumerate(data):
            assert (x == n * i + n * (n - 1) // 2).all(), i
        x = np.full(20000, float(rank))
        chain = [ours.Ibcast(x, 1), ours.Iallreduce(MPI.IN_PLACE, x), ours.Ireduce(MPI.IN_PLACE if rank == 0 else x, x)]
        MPI.Request.Waitall(chain)
        assert (x == (n * n if rank == 0 else n)).all()


@mpi(ranks=(2,))
def test_buffers_live_as_long_as_their_call(comm: MPI.Intracomm) -> None:
    """They are kept while it is under way, and given up by the time that Wait returns: ours, and what MPI does."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        if ours.how("allreduce", 1 << 20)["executor"] != "c":
            pytest.skip("no C compiler: the steps in NumPy keep their last buffers")
        for dtype in (np.float64, np.longdouble):
            send, recv = np.full(1 << 18, comm.rank + 1, dtype), np.zeros(1 << 18, dtype)
            watch = weakref.ref(send)
            gc.disable()
            if comm.rank == 0:
                time.sleep(0.2)  # the call of rank 1 is under way meanwhile
            request = ours.Iallreduce(send, recv)
            del send
            request.Wait()
            assert (recv == 3).all()
            assert watch() is None, f"a finished call keeps its buffers ({np.dtype(dtype)})"
            gc.enable()


@mpi(ranks=(2,))
def test_errors_come_out_of_wait(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        x = np.zeros(4 + comm.rank)
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        with pytest.raises(MismatchError, match=r"rank 0: allreduce\(4 x.*rank 1: allreduce\(5 x"):
            request.Wait()
        assert request.Wait()  # it is over
        several = [ours.Iallreduce(MPI.IN_PLACE, x), comm.Ibarrier()]
        with pytest.raises(MPI.Exception):
            MPI.Request.Waitall(several)
        ours.Barrier()


@mpi(ranks=(2,))
def test_computation_goes_on_during_a_call(comm: MPI.Intracomm) -> None:
    """The progress thread does the call while this one computes: nobody waits, and it is done."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        if ours.how("allreduce", 1 << 25)["executor"] != "c":
            pytest.skip("no C compiler: NumPy's steps take the interpreter's lock")
        x = np.ones(1 << 22)
        ours.Barrier()
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        end, total = time.monotonic() + 20, 0.0
        while not request.Test() and time.monotonic() < end:
            total += float(np.arange(1000.0).sum())
        assert total > 0
        request.Wait()
        assert (x == 2).all()
