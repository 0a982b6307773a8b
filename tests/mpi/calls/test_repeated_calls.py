"""Calls made again on the same NumPy arrays, and non-blocking calls: their order, their buffers and errors."""

import gc
import shutil
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, CollectiveTimeout, MismatchError
from blinkmpi.runtime import binding, sequence
from blinkmpi.runtime.collectives import ALLREDUCE, Invocation
from blinkmpi.runtime.inspection import choice
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.host.transport import HostTransport
from tests.harness import PATIENCE_S, mpi, wait_until
from tests.mpi.test_conformance import OURS

COUNT = 3000


def kept(comm: blinkmpi.Communicator) -> int:
    """How many bound calls are kept, by C and by Python."""
    dispatcher = comm._dispatcher()
    return len(dispatcher.repeated) + len(dispatcher.binder.calls)


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
            assert kept(ours) >= 4


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
def test_a_repeated_call_is_one_call_of_c(comm: MPI.Intracomm) -> None:
    """Found there, too; it writes the record anew where the call before the last was another one."""
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        dispatcher = ours._dispatcher()
        assert dispatcher.sequence.host.native is not None
        assert dispatcher.sequence.host.native.repeated is not None, "the tests need Python's headers"
        looked_up: list[int] = []
        before = dispatcher.call
        dispatcher.call = lambda *a: looked_up.append(dispatcher.sequence.seq + 1) or before(*a)  # type: ignore[method-assign, func-returns-value]
        x, y, other = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32), np.empty(7)
        for i in range(6):
            x[:] = i
            ours.Allreduce(x, y)
            assert (y == comm.size * i).all()
        ours.Bcast(other)  # call 7
        for _ in range(3):
            ours.Allreduce(x, y)
            ours.Barrier()
        ours.Bcast(other)
        assert looked_up == [1, 7, 9]
        assert dispatcher.sequence.seq == 14
        pages = dispatcher.sequence.host.pages
        prints = [pages.fingerprints(seq) for seq in (13, 14)]
        assert all(len(set(each)) == 1 for each in prints)
        assert prints[0] != prints[1]
        request = ours.Ibarrier()
        ours.Allreduce(x, y)  # behind a non-blocking call, which C makes first
        request.Wait()
        ours.Allreduce(x, y)
        assert looked_up == [1, 7, 9]
        assert dispatcher.sequence.seq == 17


@pytest.mark.parametrize("executor", ["c", "numpy"])
@mpi(ranks=(1, 2, 3), timeout=60)
def test_a_bound_call_is_started_tested_and_waited_for(comm: MPI.Intracomm, executor: str) -> None:
    with blinkmpi.Communicator(comm, algo=OURS, executor=executor) as ours:
        dispatcher = ours._dispatcher()
        x, y = np.empty(COUNT), np.empty(COUNT)
        call = dispatcher.binder.bind(Invocation(ALLREDUCE, (x, y, MPI.SUM)), None, None, None)
        for i in range(6):
            x[:], y[:] = comm.rank + i, -1
            dispatcher.sequence.seq += 1
            call.start(dispatcher.sequence.seq)
            if i % 2:
                call.wait()
            else:
                while not call.test():
                    continue
            assert (y == sum(range(comm.size)) + comm.size * i).all()


@mpi(ranks=(2,), timeout=60)
def test_the_calls_used_least_recently_are_forgotten(comm: MPI.Intracomm) -> None:
    """More calls in a cycle than are kept are right, too, and no more are kept."""
    fewer = mock.patch.object(sequence, "KEPT_CALLS", 8), mock.patch.object(binding, "PROGRAMS", 8)
    with fewer[0], fewer[1], blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        dispatcher = ours._dispatcher()
        vectors = [np.empty(10 + i) for i in range(12)]
        for cycle in range(3):
            for x in vectors:
                x[:] = comm.rank + cycle
                ours.Allreduce(MPI.IN_PLACE, x)
                assert (x == 1 + 2 * cycle).all()
        assert kept(ours) == len(dispatcher.repeated) == len(dispatcher.binder.programs) == 8

        def known(x: np.ndarray) -> bool:  # type: ignore[type-arg]
            return dispatcher.repeated.find(ALLREDUCE, (MPI.IN_PLACE, x, MPI.SUM)) is not None

        ours.Allreduce(MPI.IN_PLACE, vectors[4])  # the oldest of those that are kept
        ours.Allreduce(MPI.IN_PLACE, vectors[0])  # for which the oldest goes, which is the next one now
        assert [known(x) for x in vectors] == [i in (0, 4, *range(6, 12)) for i in range(12)]


@mpi(ranks=(2,), timeout=60)
def test_what_is_kept_keeps_no_memory_of_the_user(comm: MPI.Intracomm) -> None:
    class Watched(np.ndarray):  # type: ignore[type-arg]
        """An array that can be watched."""

    for algo in (OURS, "allreduce:mpi"):
        with blinkmpi.Communicator(comm, algo=algo) as ours:
            owner = np.empty(COUNT).view(Watched)
            gone = weakref.ref(owner)
            ours.Allreduce(MPI.IN_PLACE, owner.view(np.ndarray))
            assert kept(ours) == 1
            del owner
            gc.collect()
            assert gone() is None


@mpi(ranks=(1,), timeout=60)
def test_what_is_forgotten_gives_its_arguments_back(comm: MPI.Intracomm) -> None:
    """C keeps the objects that it finds a call by, so that no others take their place."""
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        dtype = np.dtype(np.float64, metadata={"of": "this test alone"})
        x = np.ones(COUNT, dtype)
        before = sys.getrefcount(dtype)
        for _ in range(3):
            ours.Allreduce(MPI.IN_PLACE, x)
        assert sys.getrefcount(dtype) > before
        ours._dispatcher().repeated.forget()
        gc.collect()
        assert sys.getrefcount(dtype) == before


@mpi(ranks=(2,), timeout=60)
def test_a_repeated_call_keeps_its_deadline(comm: MPI.Intracomm) -> None:
    """C waits a slice of it before anybody looks after the peers."""
    ours = blinkmpi.Communicator(comm, algo=OURS, timeout=0.5)
    x, y = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    for _ in range(4):
        ours.Allreduce(x, y)
    comm.Barrier()
    if comm.rank == 0:
        since, host = time.monotonic(), ours.context.host
        looks = mock.patch.object(host, "look", wraps=host.look)
        with looks as look, pytest.raises(CollectiveTimeout, match="rank 1"):
            ours.Allreduce(x, y)
        assert 0.45 <= time.monotonic() - since < 0.5 + PATIENCE_S
        assert look.call_count <= 2, "half a second has three slices of 0.2 s, C's among them: no slice more"
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
        assert kept(ours) == 0
        ours.Allreduce(x, y)
        assert (y == comm.size).all()


# ---------------------------------------------------------------- requests


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
        if choice(ours.context, "allreduce", 1 << 20)["executor"] != "c":
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


class OnStream:
    """A bound call that is made elsewhere, as one on GPU memory is."""

    def __init__(self, begun: MPI.Request, host: HostTransport) -> None:
        self._begun, self._host = begun, host
        self.seq, self.behind = 0, False

    def start(self, seq: int) -> None:
        self.seq, self.behind = seq, self._begun.Test()
        self._host.records.announce_kernel(seq, *self._host.records.encode(Called("it")), 20.0)


@mpi(ranks=(2,), timeout=60)
def test_a_call_that_is_started_gets_its_number_behind_those_that_were_begun(comm: MPI.Intracomm) -> None:
    """``Start`` of a call on GPU memory, while the progress thread makes a call on host memory."""
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        x, dispatcher = np.ones(1 << 19), ours._blink
        for _ in range(20):
            request = ours.Iallreduce(MPI.IN_PLACE, x)
            bound = OnStream(request, dispatcher.sequence.host)
            dispatcher.sequence.launch(bound)  # type: ignore[arg-type]
            assert bound.behind, "the call on the host is still under way"
            numbers = comm.allgather(bound.seq)
            assert set(numbers) == {dispatcher.sequence.seq}, numbers


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
        if choice(ours.context, "allreduce", 1 << 25)["executor"] != "c":
            pytest.skip("no C compiler: NumPy's steps take the interpreter's lock")
        x = np.ones(1 << 22)
        ours.Barrier()
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        end, done, total = time.monotonic() + PATIENCE_S, False, 0.0
        while not done and time.monotonic() < end:
            total += float(np.arange(1000.0).sum())
            done = request.Test()
        assert done
        assert total > 0
        assert (x == 2).all()


@mpi(ranks=(2,), timeout=30)
def test_persistent_calls_on_host_memory_know_our_names_of_operations(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        x, y = np.empty(COUNT), np.empty(COUNT)
        request = ours.Allreduce_init(x, y, "max")
        for i in range(3):
            x[:] = comm.rank + i
            request.Start()
            request.Wait()
            assert (y == 1 + i).all()
        request.Free()
        with pytest.raises(ArgumentError, match="avg"):
            ours.Allreduce_init(x, y, "avg")


@mpi(ranks=(2,), timeout=60)
def test_other_threads_run_while_a_repeated_call_waits(comm: MPI.Intracomm) -> None:
    """C holds the interpreter's lock for a few polls alone."""
    x, seen = np.ones(2), Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else ""))
    turns, over = [0], threading.Event()

    def count() -> None:
        while not over.wait(0.001):
            turns[0] += 1
            if turns[0] % 10 == 0 and comm.rank == 0:
                (seen / str(turns[0])).touch()

    with blinkmpi.Communicator(comm) as ours:
        for _ in range(3):
            ours.Barrier()
            ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
        thread = threading.Thread(target=count)
        thread.start()
        announced = ours.context.host.pages.announced
        for call in (ours.Barrier, lambda: ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX)):
            if comm.rank == 1:  # until the other one's thread has run while its call waits
                wait_until(lambda: announced[0] > announced[1], "rank 0 enters its call")
                before = len(list(seen.iterdir()))
                wait_until(lambda before=before: len(list(seen.iterdir())) >= before + 2, "its other thread runs")
            call()
        over.set()
        thread.join()
    if comm.rank == 0:
        shutil.rmtree(seen)
