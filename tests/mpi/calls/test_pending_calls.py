"""Non-blocking calls that C begins: who moves them on, what becomes of those that fail, and what they leave behind."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import blinkmpi
from blinkmpi.errors import CollectiveTimeout, MismatchError, PeerLost
from blinkmpi.planning.plan import Plan
from blinkmpi.runtime.requests import HostRequest
from blinkmpi.topology.model import Device, Link, Topology
from tests.harness import mpi
from tests.harness.patience import PATIENCE_S, wait_until
from tests.mpi.test_conformance import OURS

COUNT = 48
LONG = 1 << 18  # elements of a call that no rank ends at once
READ = 1 << 13  # elements of a broadcast that is read from the root


def opened(
    comm: MPI.Intracomm, change: Callable[[Plan], Plan] = lambda plan: plan, **keywords: Any
) -> blinkmpi.Communicator:
    """A communicator that has made each call of these tests, so that C begins the next ones."""
    ours = blinkmpi.Communicator(comm, algo=OURS, executor="c", **keywords)
    ours.context.planned.change(change)
    x, y, long = np.zeros(COUNT), np.zeros(COUNT), np.zeros(LONG)
    for _ in range(2):
        for request in (ours.Iallreduce(x, y), ours.Ibcast(x, 0), ours.Iallreduce(MPI.IN_PLACE, long), ours.Ibarrier()):
            request.Wait()
    return ours


@mpi(ranks=(2, 3), timeout=60)
def test_c_begins_what_it_has_made_before_in_a_few_functions(comm: MPI.Intracomm) -> None:
    with opened(comm) as ours:
        dispatcher = ours._dispatcher()
        dispatcher.start = None  # type: ignore[assignment, method-assign]  # what Python begins by
        for size in (COUNT, LONG):
            x = np.full(size, comm.rank + 1.0)
            y = np.zeros(size) if size == COUNT else x
            request = ours.Iallreduce(x if size == COUNT else MPI.IN_PLACE, y)
            assert type(request) is HostRequest
            assert request.Wait()
            assert request == MPI.REQUEST_NULL
            assert (y == comm.size * (comm.size + 1) // 2).all()
        assert not dispatcher.repeated.pending


@pytest.mark.parametrize("size", [COUNT, LONG])
@mpi(ranks=(2,), timeout=60)
def test_a_program_that_is_away_is_waited_for_by_nobody(comm: MPI.Intracomm, size: int) -> None:
    """Rank 0 makes no call of ours or of MPI's between the beginning and the end of the others' wait."""
    with opened(comm) as ours:
        x = np.full(size, comm.rank + 1.0)
        sent = np.zeros(1)
        comm.Barrier()
        request = ours.Iallreduce(MPI.IN_PLACE, x) if size == LONG else ours.Ibcast(x, 1)
        if comm.rank == 0:
            wait_until(lambda: bool((x == (3 if size == LONG else 2)).all()), "the result is there")
            wait_until(lambda: ours._dispatcher().repeated.pending == 0, "the call has ended")
            comm.Send(sent, 1)
        else:
            request.Wait()
            comm.Recv(sent, 0)
        request.Wait()


@mpi(ranks=(2,), timeout=60)
def test_a_rank_inside_another_call_moves_on_what_it_has_begun(comm: MPI.Intracomm) -> None:
    """Rank 0 waits in one communicator for what rank 1 does behind its wait in another."""
    with opened(comm) as one, opened(comm) as other:
        x, y = np.ones(LONG), np.ones(COUNT)
        for _ in range(3):
            x[:] = 1
            request = one.Iallreduce(MPI.IN_PLACE, x)
            if comm.rank == 1:
                request.Wait()
            other.Allreduce(MPI.IN_PLACE, y)
            request.Wait()
            assert (x == 2).all()


@mpi(ranks=(2, 3), timeout=60)
def test_mpi_s_own_waits_move_calls_on(comm: MPI.Intracomm) -> None:
    n = comm.size
    with opened(comm) as ours:
        xs = [np.full(COUNT, comm.rank + i) for i in range(20)]
        sums = [np.full(COUNT, 0.0) for _ in xs]
        ways: dict[str, Callable[[list[MPI.Request]], Any]] = {
            "all": MPI.Request.Waitall,
            "any": lambda each: [MPI.Request.Waitany(each) for _ in each],
            "some": lambda each: sum(len(MPI.Request.Waitsome(each) or ()) for _ in each),
            "test": lambda each: wait_until(lambda: MPI.Request.Testall(each), "all have ended"),
        }
        for name, wait in ways.items():
            for y in sums:
                y[:] = 0
            requests = [ours.Iallreduce(x.astype(float), y) for x, y in zip(xs, sums, strict=True)]
            wait([*requests, comm.Ibarrier()])
            assert all(request == MPI.REQUEST_NULL for request in requests) or name == "some"
            MPI.Request.Waitall(requests)
            for i, y in enumerate(sums):
                assert (y == n * i + n * (n - 1) // 2).all(), (name, i)


@mpi(ranks=(2,), timeout=60)
def test_the_status_of_a_call_is_that_of_no_data(comm: MPI.Intracomm) -> None:
    with opened(comm) as ours:
        for wait in (MPI.Request.Wait, HostRequest.Wait):
            status = MPI.Status()
            wait(ours.Ibarrier(), status)
            assert (status.Get_elements(MPI.BYTE), status.Is_cancelled(), status.error) == (0, False, 0)


@pytest.mark.parametrize("waits", ["Wait", "Waitall", "nobody"])
@mpi(ranks=(2,), timeout=60)
def test_a_rank_that_does_not_come_is_named_in_time(comm: MPI.Intracomm, waits: str) -> None:
    """Also where the user waits by MPI's functions, or not at all; those behind it fail with it."""
    ours = opened(comm)
    if comm.rank == 0:
        x, y = np.ones(COUNT), np.ones(COUNT)
        first, second = ours.Iallreduce(x, y, timeout=1.0), ours.Ibarrier()
        if waits == "Waitall":
            with pytest.raises(MPI.Exception):
                MPI.Request.Waitall([first])
        elif waits == "Wait":
            with pytest.raises(CollectiveTimeout, match="rank 1"):
                first.Wait()
        else:
            wait_until(lambda: ours._dispatcher().sequence.dead is not None, "the deadline is over")
            with pytest.raises(CollectiveTimeout, match="rank 1"):
                first.Wait()
        with pytest.raises(PeerLost, match="died earlier"):
            second.Wait()
        with pytest.raises(PeerLost, match="died earlier"):
            ours.Ibarrier()
    comm.Barrier()
    with suppress(CollectiveTimeout):  # of which rank 1 hears here
        ours.Free()


@mpi(ranks=(2,), timeout=60)
def test_a_rank_that_comes_late_is_waited_for_past_many_looks(comm: MPI.Intracomm) -> None:
    with opened(comm) as ours:
        if comm.rank == 1:
            time.sleep(1.5)
        x = np.full(LONG, 1.0)
        ours.Iallreduce(MPI.IN_PLACE, x).Wait()
        assert (x == 2).all()


@mpi(ranks=(2,), timeout=60)
def test_what_a_call_held_is_given_back(comm: MPI.Intracomm) -> None:
    """Waited for here, by MPI, or by nobody."""
    with opened(comm) as ours:
        for end in ("Wait", "Waitall", "dropped", "freed"):
            x, y = np.ones(COUNT), np.zeros(COUNT)
            gone = weakref.ref(x)
            request: MPI.Request | None = ours.Iallreduce(x, y)
            del x
            if end == "Wait":
                request.Wait()  # type: ignore[union-attr]
            elif end == "Waitall":
                MPI.Request.Waitall([request])
            elif end == "freed":
                request.Free()  # type: ignore[union-attr]
            request = None
            ours.Ibarrier().Wait()  # behind it
            gc.collect()
            assert gone() is None, end
            assert (y == 2).all(), end


@mpi(ranks=(2,), timeout=60)
def test_threads_may_wait_for_one_call_each(comm: MPI.Intracomm) -> None:
    with opened(comm) as ours:
        xs = [np.full(LONG, float(i)) for i in range(6)]
        requests = [ours.Iallreduce(MPI.IN_PLACE, x) for x in xs]
        threads = [threading.Thread(target=request.Wait) for request in reversed(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert all((x == 2 * i).all() for i, x in enumerate(xs))


@mpi(ranks=(2,), timeout=60)
def test_a_communicator_has_one_thread_for_them_which_ends_with_it(comm: MPI.Intracomm) -> None:
    def threads() -> int:
        return sum(thread.name == "blinkmpi-progress" and thread.is_alive() for thread in threading.enumerate())

    before = threads()
    ours = opened(comm)
    x = np.zeros(COUNT)
    for request in [ours.Ibcast(x, 0) for _ in range(200)]:
        request.Wait()
    assert threads() <= before + 2, "one, and one of what C cannot begin"
    ours.Free()
    wait_until(lambda: threads() == before, "they end")


@mpi(ranks=(2,), timeout=60)
def test_a_child_after_fork_has_no_part_in_them(comm: MPI.Intracomm) -> None:
    with opened(comm) as ours:
        x = np.ones(LONG)
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                request.Wait()
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        request.Wait()
        assert (x == 2).all()


@mpi(ranks=(2,), timeout=60)
def test_memory_of_a_call_under_way_keeps_its_length(comm: MPI.Intracomm) -> None:
    """As mpi4py's requests do: Python refuses to move what others may still write."""
    with opened(comm) as ours:
        sent, received = bytearray(8 * COUNT), bytearray(8 * COUNT)
        for _ in range(2):
            ours.Iallreduce([sent, MPI.DOUBLE], [received, MPI.DOUBLE]).Wait()
        comm.Barrier()
        if comm.rank == 0:
            request = ours.Iallreduce([sent, MPI.DOUBLE], [received, MPI.DOUBLE])
            for memory in (sent, received):
                with pytest.raises(BufferError):
                    memory.append(1)
        comm.Barrier()
        if comm.rank == 1:
            request = ours.Iallreduce([sent, MPI.DOUBLE], [received, MPI.DOUBLE])
        request.Wait()
        sent.append(1)
        received.append(1)


def opened_for_broadcasts(comm: MPI.Intracomm, topology: Topology | None = None) -> blinkmpi.Communicator:
    """The same, where long broadcasts are read from the memory of others, and each rank has been the root of one."""

    def changed(plan: Plan) -> Plan:
        own = [r for r in plan.rules if r.collective == "broadcast"]
        long = [replace(r, protocol="cma", min_bytes=8 * READ, chunk_bytes=8 * READ // 4) for r in own[:1]]
        return replace(plan, rules=(*(r for r in plan.rules if r not in own), *own[:1], *long))

    ours = opened(comm, changed, topology=topology)
    x = np.zeros(READ)
    for root in (*range(comm.size), *range(comm.size)):
        ours.Ibcast(x, root).Wait()
    return ours


@mpi(ranks=(2,), timeout=60)
def test_a_root_reads_the_next_broadcast_before_its_own_was_read(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Rank 1 has begun both, and is away."""
    ours, read = opened_for_broadcasts(comm), comm.bcast(tmp_path) / "read"
    x, y = np.full(READ, comm.rank), np.full(READ, comm.rank)
    if comm.rank == 0:
        first = ours.Ibcast(x, 0)
        comm.send(None, 1)
        second = ours.Ibcast(y, 1)
        wait_until(lambda: second.Test() or (y == 1).all(), "the second is read")
        assert not first.Test()
        assert not second.Test(), "they end in their order"
        read.touch()
    else:
        ours._dispatcher().repeated.close()  # nothing moves calls on here
        comm.recv(source=0)
        first, second = ours.Ibcast(x, 0), ours.Ibcast(y, 1)
        wait_until(read.exists, "the second is read")
        assert (x == 1).all(), "the first is not"
    first.Wait()
    second.Wait()
    assert (x == 0).all()
    assert (y == 1).all()
    ours.Free()


@pytest.mark.parametrize(("way", "roots"), [("direct", "one"), ("direct", "all"), ("line", "all")])
@mpi(ranks=(2, 3), long=(4,), timeout=60)
def test_broadcasts_that_overlap_bring_each_its_own(comm: MPI.Intracomm, way: str, roots: str) -> None:
    """A rank may write to its buffer as soon as its request has ended."""
    links = [Link(*ends, "nvlink", 1, 25_000) for r in range(comm.size - 1) for ends in ((r, r + 1), (r + 1, r))]
    line = Topology("line", tuple(Device("gpu", 0, r) for r in range(comm.size)), (), tuple(links))
    with opened_for_broadcasts(comm, line if way == "line" else None) as ours:
        xs, made = np.empty((9, READ)), ours.stats().calls
        for turn in range(12):
            requests = []
            for i, x in enumerate(xs):
                root = i % comm.size if roots == "all" else 0
                x[:] = 100 * turn + i if comm.rank == root else -1
                requests.append(ours.Ibcast(x, root))
            if turn % 3 == 0:
                MPI.Request.Waitall(requests)
            for i in range(9) if turn % 3 == 1 else reversed(range(9)):
                requests[i].Wait()
                assert (xs[i] == 100 * turn + i).all(), (turn, i)
                xs[i] = -2
        assert ours.stats().calls == made + 12 * 9


@mpi(ranks=(2, 3), long=(4,), timeout=60)
def test_calls_of_all_kinds_may_follow_one_another(comm: MPI.Intracomm) -> None:
    n = comm.size
    with opened_for_broadcasts(comm) as ours:
        long, short, sums = np.empty((3, READ)), np.empty(COUNT), np.empty((2, COUNT))
        one, whole = np.empty(COUNT), np.empty(LONG)
        for turn in range(20):
            for i, x in enumerate(long):
                x[:] = turn if comm.rank == i % n else -1
            one[:], short[:], whole[:] = comm.rank + turn, turn if comm.rank == 0 else -1, turn
            MPI.Request.Waitall(
                [
                    ours.Ibcast(long[0], 0), ours.Iallreduce(one, sums[0]), ours.Ibcast(long[1], 1), ours.Ibarrier(),
                    ours.Ibcast(long[2], 2 % n), ours.Iallreduce(MPI.IN_PLACE, whole), ours.Ibcast(short, 0),
                    ours.Iallreduce(one, sums[1]),
                ]
            )  # fmt: skip
            assert (long == turn).all()
            assert (short == turn).all()
            assert (whole == n * turn).all()
            assert (sums == n * turn + n * (n - 1) // 2).all()


@mpi(ranks=(2, 3), timeout=60)
def test_of_two_that_overlap_the_second_may_be_another_one_elsewhere(comm: MPI.Intracomm) -> None:
    with opened_for_broadcasts(comm) as ours:
        x, y, z = (np.full(READ, comm.rank) for _ in range(3))
        for root in (0, 1):
            x[:] = z[:] = comm.rank
            requests = [ours.Ibcast(x, root), ours.Ibcast(y, 1 if comm.rank else 0), ours.Ibcast(z, root)]
            with pytest.raises(MismatchError, match="the ranks disagree"):
                requests[1].Wait()
            requests[0].Wait()
            requests[2].Wait()
            assert (x == root).all()
            assert (y == comm.rank).all()
            assert (z == root).all()


@pytest.mark.parametrize("waits", ["Wait", "nobody"])
@mpi(ranks=(2,), timeout=60)
def test_a_rank_that_reads_nothing_is_named_in_time(comm: MPI.Intracomm, tmp_path: Path, waits: str) -> None:
    """Rank 1 has begun both, and is away; the second, which has begun, too, fails with the first."""
    ours, late = opened_for_broadcasts(comm), comm.bcast(tmp_path) / "late"
    x, y = np.full(READ, comm.rank), np.full(READ, comm.rank)
    if comm.rank == 0:
        first = ours.Ibcast(x, 0, timeout=1.0)
        comm.send(None, 1)
        second = ours.Ibcast(y, 1)
        if waits == "nobody":
            wait_until(lambda: not ours._dispatcher().repeated.pending, "both have ended")
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            first.Wait()
        with pytest.raises(PeerLost, match="died earlier"):
            second.Wait()
        late.touch()
    else:
        ours._dispatcher().repeated.close()
        comm.recv(source=0)
        first, second = ours.Ibcast(x, 0), ours.Ibcast(y, 1)
        wait_until(late.exists, "rank 0 has given up")
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            first.Wait()
        with pytest.raises(PeerLost, match="died earlier"):
            second.Wait()
    comm.Barrier()
    with suppress(CollectiveTimeout):
        ours.Free()
