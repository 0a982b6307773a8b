"""Communicators that are made of others: MPI makes them, and they open at their first call of ours."""

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, MismatchError, PeerLost, RemoteError, TopologyError
from blinkmpi.runtime.children import SETS, SPARE_BYTES, SPARES
from blinkmpi.top.find import windows
from blinkmpi.top.look import look
from tests.harness import PATIENCE_S, mpi, run_ranks
from tests.mpi.test_conformance import OURS

LIVE = 50  # children that are there at the same time
MOST = (64 << 20) // 1000  # bytes of /dev/shm that a child of two ranks holds which has made a short call


def made(comm: Any) -> dict[str, Any]:
    """A child by each of the methods."""
    group = comm.Get_group()
    found = {
        "Dup": comm.Dup(), "Clone": comm.Clone(), "Idup": comm.Idup()[0], "Split": comm.Split(0, -comm.rank),
        "Split_type": comm.Split_type(MPI.COMM_TYPE_SHARED), "Create": comm.Create(group),
        "Create_group": comm.Create_group(group), "Dup_with_info": comm.Dup_with_info(MPI.INFO_NULL),
    }  # fmt: skip
    group.Free()
    return found


def opened(comm: Any) -> bool:
    return comm._blink is not None


def held(comm: Any) -> tuple[int, int]:
    """Bytes that the memory of a communicator and its children takes, when all ranks are here; and own descriptors."""
    comm.barrier()
    found = os.fstat(comm.context.host.window.file.file).st_blocks * 512, len(os.listdir("/proc/self/fd"))
    comm.barrier()
    return found


def total(comm: Any, n: int = 4) -> None:
    """An allreduce of ``n`` doubles."""
    x = np.full(n, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == comm.size * (comm.size + 1) / 2).all()


@mpi(ranks=(2, 3))
def test_what_needs_mpi_alone_opens_nothing(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        children = made(ours)
        before = held(ours)
        for name, child in children.items():
            assert (child.Get_rank(), child.Get_size()) == (child.rank, child.size) == (child.rank, comm.size)
            assert child.allreduce(1) == comm.size
            assert child.bcast(name) == name
            assert child.sendrecv(child.rank, (child.rank + 1) % comm.size) == (child.rank - 1) % comm.size
            again = child.Allreduce_init(np.ones(2), np.empty(2))
            again.Start()
            again.Wait()
            assert not opened(child), name
        assert held(ours) == before
        for child in children.values():
            child.Free()
            assert child == MPI.COMM_NULL
            with pytest.raises(ArgumentError, match="freed; make one with"):
                child.Barrier()
            child.free()
        assert held(ours) == before


@mpi(ranks=(2, 3))
def test_what_a_communicator_knows_of_itself_before_it_opens(comm: MPI.Intracomm) -> None:
    """On one rank alone, because none of it needs the others."""
    with blinkmpi.Communicator(comm, strict=True, timeout=20) as ours:
        child = ours.Split(0, -comm.rank)
        if comm.rank == 1:
            assert child.strict
            assert (child.machine.n, child.plans.n, child.gpu) == (comm.size, comm.size, None)
            assert child.executor == ours.executor
            assert child.stats().calls == 0
            assert (child.stats().rank, child.stats().n) == (child.rank, comm.size)
            child.check()
            with pytest.raises(ArgumentError, match="no memory pool"):
                child.memory_pool()
            said, line = child.explain("allreduce", 1 << 20), child.plan_line("broadcast", 1)
            assert not opened(child)
        total(child)
        assert opened(child)
        assert child.executor == ours.executor
        assert child.machine.n == comm.size
        if comm.rank == 1:
            assert (said, line) == (child.explain("allreduce", 1 << 20), child.plan_line("broadcast", 1))
        child.Free()


@mpi(ranks=(2, 3))
def test_a_first_call_that_does_not_block_waits_for_no_rank(comm: MPI.Intracomm) -> None:
    """A rank that comes later may first have to hear from one that has begun."""
    last, x = comm.size - 1, np.full(1000, comm.rank + 1.0)
    with blinkmpi.Communicator(comm, algo=OURS, timeout=20) as ours:
        child = ours.Dup()
        if comm.rank == last:
            comm.recv(source=0)
        requests = [child.Iallreduce(MPI.IN_PLACE, x), child.Ibcast(y := np.full(3, comm.rank), root=last)]
        if comm.rank == 0:
            comm.send(None, last)
        z = np.full(5, comm.rank)
        child.Bcast(z, root=last)  # behind the others
        assert (z == last).all()
        assert (y == last).all()
        for request in requests:
            request.Wait()
        assert (x == comm.size * (comm.size + 1) / 2).all()
        op = MPI.Op.Create(lambda a, b, _: np.frombuffer(b, "d").__iadd__(np.frombuffer(a, "d")), commute=True)
        other = ours.Dup()
        other.Iallreduce(np.ones(2), w := np.empty(2), op).Wait()
        assert (w == comm.size).all()
        op.Free()
        for _ in range(5):  # what is MPI's own goes on beside it, in the order of the user's calls
            beside = ours.Dup()
            request = beside.Iallreduce(MPI.IN_PLACE, w := np.full(10, comm.rank + 1.0))
            assert beside.allgather(comm.rank) == list(range(comm.size))
            assert beside.bcast(comm.rank, root=last) == last
            request.Wait()
            assert (w == comm.size * (comm.size + 1) / 2).all()
            beside.Free()
        with pytest.raises(BlinkError):  # the arguments are looked at when all are there
            ours.Dup().Ibcast(np.ones(2), root=comm.size).Wait()
        other.Free()
        child.Free()


@mpi(ranks=(2,))
def test_children_hold_little_memory_and_no_descriptor(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        total(ours)
        ours.Barrier()
        (before, files), children = held(ours), []
        for i in range(LIVE):
            child = (ours.Dup, ours.Split)[i % 2]()
            total(child)
            child.Bcast(np.ones(4), root=1)
            children.append(child)
        now, descriptors = held(ours)
        assert descriptors == files
        assert 0 < now - before <= LIVE * MOST
        for child in children:
            total(child, 100_000)
        for child in children:
            child.Free()
        now, descriptors = held(ours)
        assert descriptors == files
        assert now - before <= SPARES * SPARE_BYTES * comm.size  # for the next ones
        grandchild = ours.Dup().Dup()
        total(grandchild)
        grandchild.Free()


@mpi(ranks=(2,))
def test_others_see_each_communicator_of_a_file(comm: MPI.Intracomm) -> None:
    """As blinkmpi top does."""
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        child, peer = ours.Dup(), comm.bcast(os.getpid(), root=1)
        for _ in range(3):
            child.Barrier()
        ours.Barrier()
        comm.Barrier()
        if comm.rank == 0:
            file = os.fstat(ours.context.host.window.file.file)
            seen = [look(window) for window in windows(peer) if window.file[:2] == (file.st_dev, file.st_ino)]
            assert sorted(tuple(each.entered for each in found.ranks) for found in seen) == [(2, 2), (3, 3)]
        comm.Barrier()
        child.Free()
        comm.Barrier()
        if comm.rank == 0:  # what is kept for the next one is none
            seen = [look(window) for window in windows(peer) if window.file[:2] == (file.st_dev, file.st_ino)]
            assert [tuple(each.entered for each in found.ranks) for found in seen] == [(2, 2)]
        comm.Barrier()
        other = ours.Dup()
        other.Barrier()
        ours.Barrier()
        if comm.rank == 0:
            seen = [look(window) for window in windows(peer) if window.file[:2] == (file.st_dev, file.st_ino)]
            assert len(seen) == 2
        comm.Barrier()
        other.Free()


@mpi(ranks=(2, 3))
@pytest.mark.parametrize("executor", ["c", "numpy"])
def test_a_child_in_each_call_that_nobody_frees_holds_nothing(comm: MPI.Intracomm, executor: str) -> None:
    """As in the QR decomposition of heat; MPI's own communicators stay, as with mpi4py."""

    def qr(ours: Any) -> None:
        child = ours.Split(0, comm.rank)
        child.Bcast(np.full(1000, comm.rank), root=1)

    with blinkmpi.Communicator(comm, executor=executor, timeout=20) as ours:
        qr(ours)
        qr(ours)  # goes on with what the first one has left, and has slots for calls of odd numbers, too
        before = held(ours)
        gc.disable()
        try:
            for _ in range(20):
                qr(ours)
            assert held(ours) == before
        finally:
            gc.enable()


@mpi(ranks=(2, 3))
def test_the_next_of_the_same_ranks_goes_on_with_what_one_has_left(comm: MPI.Intracomm) -> None:
    n = comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        first = ours.Split(0, -comm.rank)
        for _ in range(3):
            total(first)
        number = first.context.number
        first.Free()
        for i in range(6):
            other = ours.Split(0, -comm.rank)
            assert other.stats().calls == 0
            assert other.rank == n - 1 - comm.rank
            total(other)
            y = np.full(4, other.rank)
            other.Bcast(y, root=n - 1)
            assert (y == n - 1).all()
            assert other.stats().calls == 2
            if i % 2:  # an error's frames would hold it
                with pytest.raises(MismatchError):
                    other.Bcast(np.ones(3 + (other.rank == 1)), root=0)
            total(other, 5 + i)
            assert other.context.number == number
            op = MPI.Op.Create(lambda a, b, _: np.frombuffer(b, "d").__iadd__(np.frombuffer(a, "d")), commute=True)
            x = np.ones(3)
            other.Allreduce(MPI.IN_PLACE, x, op)  # MPI's own, on the communicator that is
            assert (x == n).all()
            op.Free()
            if i % 2:
                other.Free()
            del other
        same = ours.Split(0, comm.rank)  # the same ranks in another order
        total(same)
        assert same.context.number != number
        same.Free()


@mpi(ranks=(2, 4))
def test_gpus_are_looked_for_once_where_ranks_share_one(comm: MPI.Intracomm) -> None:
    looked_for = mock.patch("blinkmpi.runtime.context.open_gpus", return_value=(None, "rank 3 has no GPU"))
    with blinkmpi.Communicator(comm, timeout=20) as ours, looked_for as open_gpus:
        ours.context.why_no_gpus = "ranks 0 and 1 are both on GPU 0"  # no reason for each part of the ranks
        for i in range(3):
            for parts in (1, 2):
                child = ours.Split(comm.rank % parts, comm.rank)
                total(child)
                assert child.context.gpus is None
                grandchild = child.Dup()
                total(grandchild)
                grandchild.Free()
                child.Free()
                assert open_gpus.call_count == int((i, parts) > (0, 1))


@mpi(ranks=(2, 3))
def test_ranks_that_hold_different_ones_open_another(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        kept, dropped = ours.Dup(), ours.Dup()
        total(kept)
        total(dropped)
        numbers = kept.context.number, dropped.context.number
        if comm.rank == 0:
            del dropped
        comm.Barrier()
        third = ours.Dup()  # which rank 0 alone could go on with the second for
        total(third)
        assert third.context.number not in numbers
        if comm.rank == 0:
            del kept
        else:
            del dropped
        comm.Barrier()
        fourth = ours.Dup()  # for which all have the second, and rank 0 has the first, too
        total(fourth)
        total(third)
        third.Free()
        fourth.Free()


@mpi(ranks=(2,))
def test_an_interrupt_amid_the_opening_leaves_it_dead(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        child = ours.Dup()
        with (
            mock.patch("blinkmpi.runtime.children._numbers_of_all", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            child.Barrier()
        with pytest.raises(PeerLost, match="died earlier"):
            child.Barrier()
        child.Free()
        total(ours.Dup())


@mpi(ranks=(2,), timeout=60)
def test_threads_that_make_and_free_children_at_the_same_time(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        lines, wrong = [comm.Dup() for _ in range(3)], []
        parents = [blinkmpi.Communicator(line, timeout=20) for line in lines]
        shared = [[ours.Dup() for _ in range(3)] for _ in range(20)]  # made in one order, used and freed in any

        def work(which: int) -> None:
            try:
                for i in range(20):
                    child = parents[which].Dup()
                    total(child, 3 + i)
                    total(shared[i][which], 3 + which)
                    child.Free()
                    shared[i][which].Free()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        for parent in parents:
            parent.Free()
        for line in lines:
            line.Free()


@mpi(ranks=(2,))
def test_one_that_is_dropped_while_calls_are_under_way_is_given_back_behind_them(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo=OURS, timeout=20) as ours:
        total(ours.Dup())
        before, threads = held(ours), threading.active_count()
        for opens_first in (True, False):
            child = ours.Dup()
            if opens_first:
                child.Barrier()
            if comm.rank == 1:
                comm.recv(source=0)
            x, y = np.full(1000, comm.rank), np.full(1000, comm.rank)
            requests = [child.Iallreduce(MPI.IN_PLACE, x), child.Iallreduce(MPI.IN_PLACE, y)]
            del child
            if comm.rank == 0:
                comm.send(None, 1)
            for request in requests:
                request.Wait()
            assert (x == 1).all()
            assert (y == 1).all()
            wait_until(lambda: held(ours) <= before, comm)
            wait_until(lambda: threading.active_count() <= threads, comm)


def wait_until(done: Callable[[], bool], comm: MPI.Intracomm) -> None:
    """Look, on all ranks together, until it is so."""
    until = time.monotonic() + PATIENCE_S
    while not comm.allreduce(done(), MPI.LAND):
        assert comm.bcast(time.monotonic() < until)
        time.sleep(0.01)


@mpi(ranks=(3,))
def test_a_rank_that_has_dropped_it_is_named(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        child = ours.Dup()
        child.Barrier()
        if comm.rank == 2:
            del child
        else:
            with pytest.raises(PeerLost, match=r"rank 2 \(process \d+\) has dropped its communicator"):
                child.Barrier()
        ours.Barrier()


@mpi(ranks=(2,))
def test_a_child_outlives_its_parent(comm: MPI.Intracomm) -> None:
    ours = blinkmpi.Communicator(comm, timeout=20)
    one, other = ours.Dup(), ours.Split()
    total(one)
    ours.Free()
    total(one, 1000)
    total(other)
    grandchild = other.Dup()
    other.Free()
    total(grandchild, 100_000)
    grandchild.Free()
    one.Free()


@mpi(ranks=(3,))
def test_a_group_of_ranks_makes_one_of_a_communicator_that_has_not_opened(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        child = ours.Split(0, -comm.rank)
        if child.rank < 2:
            whole = child.Get_group()
            group = whole.Incl([1, 0])
            part = child.Create_group(group)
            assert not opened(child)
            total(part)
            assert part.machine.n == 2
            assert part.allgather(child.rank) == [1, 0]
            part.Free()
            group.Free()
            whole.Free()
        total(child)
        child.Free()


@mpi(ranks=(3,))
def test_communicators_of_the_same_ranks_plan_once(comm: MPI.Intracomm) -> None:
    odd = comm.rank % 2
    with blinkmpi.Communicator(comm, algo=OURS, timeout=20) as ours:
        total(ours, 1000)
        parts = ours.context.planned.parts
        for make in (ours.Dup, lambda: ours.Split(odd, -comm.rank), lambda: ours.Split(odd, comm.rank)):
            first = make()
            same = first.size == comm.size
            total(first, 1000)
            learnt = first.context.planned.parts
            second = make()
            with mock.patch("blinkmpi.planning.on_demand.PlanOnDemand.add", side_effect=AssertionError):
                total(second, 1000)
            assert second.context.planned.parts == learnt == (parts if same else learnt)
            assert second.plans == first.plans
            second.Bcast(np.ones(9))
            assert second.context.planned.parts == tuple(dict.fromkeys([*learnt, ("broadcast", 0)]))
            assert first.context.planned.parts == learnt
            first.Free()
            second.Free()
        for i in range(3):  # ranks that know different plans take none of them
            child = ours.Dup()
            if comm.rank == i:
                ours.context.parent.plans.clear()
            total(child, 1000)
            child.Free()
        assert len(ours.context.parent.plans) <= SETS
        ours.replan()
        child = ours.Dup()
        total(child, 1000)
        child.Free()


@mpi(ranks=(3,))
def test_a_meeting_is_made_in_c_and_not_counted(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for _ in range(3):
            ours.Split().Free()
        before = ours.context.host.recorder.counters
        assert not [c for c in ours.stats().collectives if c.collective != "barrier"], before
        with ours.grouped():  # a group is of calls that move data
            child = ours.Dup()
            ours.Bcast(np.ones(3))
        child.Free()
        with pytest.raises(MismatchError, match=r"rank 1: Dup\(\)"):
            (ours.Dup if comm.rank == 1 else ours.Split)()
        with pytest.raises(MismatchError, match=r"rank 2: .*barrier"):
            (ours.Barrier if comm.rank == 2 else ours.Split)()
        ours.Split().Free()


@mpi(ranks=(2, 3))
def test_what_goes_on_with_what_one_has_left_is_freed_in_c(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        total(first := ours.Dup())
        first.Free()
        for _ in range(2):
            total(child := ours.Dup())
            sequence, host = child._dispatcher().sequence, child.context.host
            with mock.patch.object(sequence, "launch", None), mock.patch.object(host, "barrier", None):
                child.Free()


@mpi(ranks=(2, 3))
def test_it_may_be_freed_on_one_rank_alone(comm: MPI.Intracomm) -> None:
    """Both sides hear of it, the one that is freed in C, too; and the next communicator is well."""
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for turn in range(3):
            total(child := ours.Dup())
            if turn == 0:
                child.Free()
                continue
            with pytest.raises(MismatchError, match=r"rank 1: free\(\)"):
                child.Free() if comm.rank == 1 else total(child)
            with pytest.raises(ArgumentError if comm.rank == 1 else BlinkError):
                total(child)  # it is freed, or dead


@mpi(ranks=(2,))
def test_a_dead_one_opens_no_more(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        child = ours.Dup()
        with pytest.raises(ZeroDivisionError), child:
            _ = 1 // 0
        with pytest.raises(ArgumentError, match="freed"):
            child.Barrier()
        comm.Barrier()
        forked = ours.Dup()
        pid = os.fork()
        if not pid:
            try:
                forked.Barrier()
            except PeerLost:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        total(forked)
        forked.Free()


# ---------------------------------------------------------------- no room


@contextmanager
def no_room(least: int = 0) -> Iterator[None]:
    """Let this rank reserve nothing in /dev/shm of more than so many bytes; other memory is not limited."""
    reserve = os.posix_fallocate

    def fallocate(file: int, at: int, length: int) -> None:
        if length > least and os.readlink(f"/proc/self/fd/{file}").startswith("/dev/shm"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, at, length)

    with mock.patch("os.posix_fallocate", fallocate):
        yield


def every_call(ours: Any) -> None:
    """Calls of all kinds, which MPI makes."""
    rank, n = ours.rank, ours.size
    ours.Barrier()
    for size in (1, 1000, 300_000):
        total(ours, size)
    ours.Bcast(x := np.full(5000, rank), root=n - 1)
    assert (x == n - 1).all()
    got = np.empty((n, 3), np.int64)
    ours.Allgather(np.full(3, rank), got)
    assert got[:, 0].tolist() == list(range(n))
    ours.Alltoallv([np.full(n, rank), np.ones(n, int)], [y := np.empty(n, int), np.ones(n, int)])
    assert y.tolist() == list(range(n))
    request = ours.Iallreduce(MPI.IN_PLACE, z := np.ones(1000))
    request.Wait()
    assert (z == n).all()
    with ours.grouped():
        ours.Allreduce(MPI.IN_PLACE, a := np.ones(3))
        ours.Allreduce(MPI.IN_PLACE, b := np.ones(4))
        ours.Bcast(c := np.full(2, rank))
    assert (a.sum(), b.sum(), c.sum()) == (3 * n, 4 * n, 0)
    with pytest.raises(BlinkError, match="avg"):
        ours.Allreduce(MPI.IN_PLACE, np.ones(3), "avg")
    with pytest.raises(MismatchError):
        ours.Bcast(np.ones(3), root=rank % 2)
    total(ours, 2)


@mpi(ranks=(2, 3))
def test_without_room_mpis_own_collectives_carry_the_calls(comm: MPI.Intracomm) -> None:
    with no_room() if comm.rank == 1 else no_room(1 << 30):
        with blinkmpi.Communicator(comm, timeout=20) as ours:
            assert ours.context.host.window.full
            assert "MPI's own collective, because /dev/shm" in ours.explain("allreduce")
            every_call(ours)
            child = ours.Dup()
            every_call(child)
            child.Free()
        with pytest.raises(TopologyError, match="needs at least"):
            blinkmpi.Communicator(comm, timeout=20, strict=True)
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        assert not ours.context.host.window.full
        with no_room() if comm.rank == 1 else no_room(1 << 30):
            child = ours.Dup()
            every_call(child)
            child.Free()
        child = ours.Dup()
        child.Barrier()
        with no_room() if comm.rank == 1 else no_room(1 << 30):  # none any more, when calls need it
            for size in (1, 1000, 300_000):
                total(child, size)
            request = child.Iallreduce(MPI.IN_PLACE, z := np.ones(1001))
            request.Wait()
            assert (z == comm.size).all()
        total(child, 1000)
        child.Free()


@mpi(ranks=(2,))
def test_a_strict_child_without_room_is_an_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20, strict=True) as ours:
        child = ours.Dup()
        with no_room() if comm.rank == 1 else no_room(1 << 30), pytest.raises(TopologyError, match="needs at least"):
            child.Barrier()
        child.Barrier()  # there is room now
        full = pytest.raises(TopologyError if comm.rank == 1 else RemoteError, match="no room for slots")
        with no_room() if comm.rank == 1 else no_room(1 << 30), full:
            total(child, 1000)
        total(child, 1000)
        child.Free()


def fallback(comm: MPI.Intracomm) -> None:
    with no_room(), blinkmpi.Communicator(comm) as ours:
        for _ in range(3):
            total(ours, 1000)
            ours.Bcast(np.ones(10_000))
    with blinkmpi.Communicator(comm) as ours, no_room():
        for _ in range(3):
            child = ours.Dup()
            total(child, 1000)
            child.Free()


@pytest.mark.mpi_skip
def test_the_reason_is_said_once() -> None:
    report = run_ranks(2, fallback, 30)
    assert report.problem is None, report.problem
    lines = [line for line in report.job.output.splitlines() if "MPI's own collectives carry the calls" in line]
    assert len(lines) == 2, lines  # of the first communicator, and of the second one's children
    assert "because /dev/shm on " in lines[0]
    assert "because /dev/shm has no room for slots: free communicators" in lines[1]
