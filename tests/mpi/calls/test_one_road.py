"""Every form of a call takes one road: what C has kept of a call serves all buffers of its kind, and no others."""

import array
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, CollectiveTimeout, PeerLost
from tests.effort import Effort
from tests.harness import mpi
from tests.mpi.test_conformance import OURS

COUNT = 48
PACKAGE = str(Path(blinkmpi.__file__).parent)
Make = Callable[[], Any]
Array = np.ndarray[Any, Any]


def of_torch() -> Any:
    return pytest.importorskip("torch").zeros(COUNT, dtype=pytest.importorskip("torch").float64)


FORMS: dict[str, Make] = {
    "array": lambda: np.zeros(COUNT),
    "array of two dimensions": lambda: np.zeros((6, COUNT // 6), order="F"),
    "array, type": lambda: [np.zeros(COUNT), MPI.DOUBLE],
    "array, code": lambda: [np.zeros(COUNT), "d"],
    "array, count, type": lambda: (np.zeros(COUNT + 3), COUNT, MPI.DOUBLE),
    "array, count, displacement, type": lambda: [np.zeros(COUNT + 3), COUNT, 2, MPI.DOUBLE],
    "array, pair, type": lambda: [np.zeros(COUNT + 3), (COUNT, 3), MPI.DOUBLE],
    "bytes as numbers": lambda: [bytearray(8 * COUNT), MPI.DOUBLE],
    "memoryview": lambda: memoryview(np.zeros(COUNT)),
    "array.array": lambda: array.array("d", bytes(8 * COUNT)),
    "subclass": lambda: np.zeros(COUNT).view(np.matrix),
    "tensor": of_torch,
}


def memory(form: Any) -> Array:
    """The COUNT elements that a form names."""
    if not isinstance(form, list | tuple):
        return np.asarray(form).reshape(-1, order="A")
    data, *rest = form
    numbers = [part for part in rest if isinstance(part, int | tuple)]
    start = numbers[0][1] if numbers and isinstance(numbers[0], tuple) else numbers[1] if len(numbers) > 1 else 0
    return np.frombuffer(data, np.float64)[start : start + COUNT]


class Looked:
    """The calls that come to Python to be looked up."""

    def __init__(self, comm: blinkmpi.Communicator) -> None:
        self.count, dispatcher = 0, comm._dispatcher()
        before = dispatcher.call

        def call(*args: Any) -> None:
            self.count += 1
            before(*args)

        dispatcher.call = call  # type: ignore[method-assign]


@pytest.mark.parametrize("form", FORMS)
@mpi(ranks=(2, 3), timeout=60)
def test_buffers_of_every_form_are_found_wherever_they_lie(comm: MPI.Intracomm, form: str) -> None:
    make, n, rank = FORMS[form], comm.size, comm.rank
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        looked = Looked(ours)
        for turn in range(4):
            send, recv, vector = make(), make(), make()
            memory(send)[:] = np.arange(COUNT) + rank + turn
            ours.Allreduce(send, recv)
            assert (memory(recv) == n * (np.arange(COUNT) + turn) + n * (n - 1) // 2).all(), turn
            memory(vector)[:] = turn if rank == n - 1 else -1
            ours.Bcast(vector, root=np.int64(n - 1))
            assert (memory(vector) == turn).all(), turn
            ours.Reduce(MPI.IN_PLACE if rank == 0 else vector, vector if rank == 0 else None, MPI.SUM)
            assert (memory(vector) == (n * turn if rank == 0 else turn)).all(), turn
        assert looked.count == 3, "only the first call of each kind"


@mpi(ranks=(2, 3), timeout=60)
def test_what_is_bound_serves_no_other_kind_of_call(comm: MPI.Intracomm) -> None:
    """Calls by chance of a few buffers that may overlap, beside MPI's: the same results, or an error on every rank."""
    n, rank, draw = comm.size, comm.rank, random.Random(11)
    wrong = right = 0
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        for turn in range(400):
            pool = np.random.default_rng(turn + 1000 * rank).integers(0, 99, 8 * COUNT).astype(np.float64)
            dtype = draw.choice([np.float64, np.int64, np.float32])
            at = [draw.choice([0, COUNT // 2, COUNT, 2 * COUNT, 3 * COUNT]) for _ in range(2)]
            count = draw.choice([1, COUNT // 2, COUNT])
            alike, places = draw.random() < 0.2, draw.random() < 0.2
            kind, root = draw.choice(["Allreduce", "Allgather", "Scatter", "Exscan"]), draw.randrange(n)
            mine, theirs = pool.astype(dtype), pool.astype(dtype)
            outcomes = []
            for which, memory_of in ((comm, theirs), (ours, mine)):
                block = {"Allgather": (1, n), "Scatter": (n, 1)}.get(kind, (1, 1))
                a = memory_of[at[0] : at[0] + block[0] * count]
                b = memory_of[at[1] : at[1] + block[1] * count]
                a = b if alike and len(a) == len(b) else a
                send: Any = MPI.IN_PLACE if places and kind != "Scatter" else a
                apart = send is MPI.IN_PLACE or not np.shares_memory(a, b)
                if which is comm and not apart:
                    continue  # which MPI forbids
                args = (send, b, root) if kind == "Scatter" else (send, b)
                try:
                    getattr(which, kind)(*args)
                    outcomes.append(True)
                except BlinkError:
                    outcomes.append(False)
            if len(outcomes) == 2:
                assert outcomes == [True, True], (turn, kind)
                assert (mine == theirs).all(), (turn, kind, dtype, at, count)
            right, wrong = right + outcomes[-1], wrong + (not outcomes[-1])
    assert right > 100
    assert wrong > 20


@mpi(ranks=(2,), timeout=60)
def test_numbers_in_arrays_are_compared_by_what_they_say(comm: MPI.Intracomm) -> None:
    """The root, and counts: NumPy's arrays and scalars are no buffers there."""
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        root, counts, places = np.array(0), np.array([1, 3]), np.array([0, 1])
        for turn in range(6):
            root[...] = turn % n
            x = np.full(3, float(rank))
            ours.Bcast(x, root=root)
            assert (x == turn % n).all(), turn
            counts[:] = (1, 3) if turn % 2 else (2, 2)
            block = np.zeros(counts[rank])
            ours.Reduce_scatter(np.arange(4.0), block, counts)
            assert (block == n * np.split(np.arange(4.0), [counts[0]])[rank]).all(), turn
            places[:] = (0, counts[0]) if turn < 3 else (4 - counts[0], 0)
            whole = np.zeros(4)
            ours.Allgatherv(np.full(counts[rank], rank + 1.0), [whole, counts, places, MPI.DOUBLE])
            for r in range(n):
                assert (whole[places[r] : places[r] + counts[r]] == r + 1).all(), turn


@mpi(ranks=(2,), timeout=60)
def test_an_operation_that_was_freed_is_not_found(comm: MPI.Intracomm) -> None:
    """MPI may give its handle to the next one."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x, y = np.full(3, comm.rank + 2.0), np.empty(3)
        for sign in (1, -1, 1, -1):

            def work(a: Any, b: Any, _: MPI.Datatype, sign: int = sign) -> None:
                np.frombuffer(b, np.float64)[:] += sign * np.frombuffer(a, np.float64)

            op = MPI.Op.Create(work, commute=False)
            ours.Allreduce(x, y, op)
            op.Free()
            assert (y == 3 + sign * 2).all()


@mpi(ranks=(2,), timeout=60)
def test_a_time_of_a_call_makes_no_other_call_of_it(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo=OURS, executor="c", timeout=60) as ours:
        looked = Looked(ours)
        x, y = np.ones(COUNT), np.empty(COUNT)
        for timeout in (5, 5.0, None, np.float64(7), 3):
            ours.Allreduce(x, y, timeout=timeout)
            assert (y == 2).all()
        assert looked.count == 2, "the first call, and a time that is no plain number"
        with pytest.raises(BlinkError, match=r"timeout=-1"):
            ours.Allreduce(x, y, timeout=-1)
        with pytest.raises(BlinkError, match=r"timeout='a while'"):
            ours.Allreduce(x, y, timeout="a while")  # type: ignore[arg-type]
        ours.Allreduce(x, y)
        assert (y == 2).all()


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@mpi(ranks=(2,), timeout=60)
def test_a_call_has_its_own_time_whoever_makes_it(comm: MPI.Intracomm, known: bool) -> None:
    ours = blinkmpi.Communicator(comm, algo=OURS, executor="c", timeout=100)
    x, y = np.ones(COUNT), np.empty(COUNT)
    ours.Barrier()
    if known:
        ours.Allreduce(x, y)
    comm.Barrier()
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            ours.Allreduce(x, y, timeout=0.5)
    comm.Barrier()
    if comm.rank == 1:
        with pytest.raises(CollectiveTimeout, match="rank 0"):
            ours.Allreduce(x, y, timeout=0.5)
    ours.Free()


class Interrupt(BaseException):
    """What a signal's handler raises."""


def interrupted(work: Callable[[], object], line: int) -> bool:
    """Do some work, and raise an Interrupt at so many lines of the package's Python; whether there are as many."""
    seen = 0

    def note(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise Interrupt
        return note

    sys.settrace(note)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


LINES = {"C begins": 5, "Python begins": 25, "non-blocking": 8}  # that are run at least


@pytest.mark.parametrize("how", LINES)
@mpi(ranks=(2,), timeout=120)
def test_a_call_that_is_interrupted_anywhere_is_made_or_ends_the_communicator(comm: MPI.Intracomm, how: str) -> None:
    """On one rank; the other one waits, and hears of it."""
    x, line, dead = np.ones(COUNT), 0, 0
    while True:
        line += 1
        comm.Barrier()
        with blinkmpi.Communicator(comm, algo=OURS, executor="c", timeout=30) as ours:
            y = np.zeros(COUNT)
            for _ in range(2):
                ours.Allreduce(x, y)
                ours.Iallreduce(x, y).Wait()
            dispatcher = ours._dispatcher()
            if how == "Python begins":
                dispatcher.repeated.shut()
            comm.Barrier()
            work = ours.Allreduce if how != "non-blocking" else lambda x, y: ours.Iallreduce(x, y).Wait()
            number, there = dispatcher.sequence.seq, False
            if comm.rank == 0:
                there = interrupted(partial(work, x, y), line)
                if there and dispatcher.sequence.dead is None and dispatcher.sequence.seq == number:
                    work(x, y)  # it was not begun
            else:
                with suppress(BlinkError):
                    work(x, y)
            there = comm.bcast(there, 0)
            try:
                ours.Barrier()
                ours.Allreduce(x, y)
                assert (y == 2).all(), line
            except PeerLost:
                dead += 1
        if not there:
            break
    assert line > LINES[how]
    assert dead or how == "non-blocking"  # which is C's, but for what is late


def effort_of(work: Callable[[], object]) -> Effort:
    """What some work takes."""
    with Effort() as effort:
        work()
    return effort


@mpi(ranks=(1, 2), timeout=60)
def test_a_repeated_call_is_three_functions_of_python(comm: MPI.Intracomm) -> None:
    """With buffers that were there before, and with new ones."""
    n = comm.size
    with blinkmpi.Communicator(comm, algo=OURS, executor="c") as ours:
        x, whole, counts = np.ones(COUNT), np.empty(n * COUNT), [COUNT] * n
        places = [COUNT * r for r in range(n)]
        kinds: dict[str, Callable[[Array], object]] = {
            "Allreduce": lambda y: ours.Allreduce(x, y),
            "Allreduce of specifications": lambda y: ours.Allreduce([x, MPI.DOUBLE], [y, MPI.DOUBLE]),
            "Allreduce of memoryviews": lambda y: ours.Allreduce(memoryview(x), memoryview(y)),
            "Bcast": lambda y: ours.Bcast(y),
            "Allgather": lambda y: ours.Allgather(y, whole),
            "Allgatherv": lambda y: ours.Allgatherv(y, [whole, counts, places, MPI.DOUBLE]),
            "Allgatherv of a pair": lambda y: ours.Allgatherv(y, [whole, (counts, places), MPI.DOUBLE]),
            "Allgatherv by arrays": lambda y: ours.Allgatherv(
                y, [whole, np.array(counts), np.array(places), MPI.DOUBLE]
            ),
            "Reduce_scatter": lambda y: ours.Reduce_scatter(whole, y, counts),
            "Reduce_scatter by an array": lambda y: ours.Reduce_scatter(whole, y, np.array(counts)),
            "with a timeout": lambda y: ours.Allreduce(x, y, timeout=50.0),
        }
        for name, call in kinds.items():
            y = np.empty(COUNT)
            for _ in range(2):
                call(y)
            assert (effort := effort_of(lambda call=call, y=y: call(y))).ours <= 3, (name, effort.calls)
            assert (effort := effort_of(lambda call=call: call(np.empty(COUNT)))).ours <= 3, (name, effort.calls)
