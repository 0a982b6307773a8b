"""Calls of blocks whose lengths differ from call to call: C makes them, and they are what Python would have made."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, RemoteError
from tests.harness import mpi

Array = np.ndarray[Any, Any]
Matrix = Array  # elements from each rank to each
ROOM = 1 << 20  # elements of a buffer
FORMS: dict[str, Callable[[Array, list[int], list[int]], Any]] = {
    "lists": lambda x, counts, displs: [x, counts, displs, MPI.DOUBLE],
    "pair": lambda x, counts, displs: [x, (counts, displs)],
    "arrays": lambda x, counts, displs: (x, np.array(counts), np.array(displs, np.int32), MPI.DOUBLE),
}


def places(counts: list[int], gaps: list[int]) -> list[int]:
    """Where blocks begin that lie one behind another, with gaps before them."""
    return [sum(counts[:r]) + sum(gaps[: r + 1]) for r in range(len(counts))]


def made(comm: Any, kind: str, form: str, lengths: Matrix, gaps: list[int], root: int, into: Array) -> None:
    """A call in which rank ``i`` sends ``lengths[i, j]`` elements to rank ``j``, of which each says whence it is."""
    rank, n = comm.rank, comm.size
    spec = FORMS[form]
    x = np.arange(ROOM, dtype=float) + rank * ROOM
    out, come = lengths[rank].tolist(), lengths[:, rank].tolist()
    if kind == "Alltoallv":
        comm.Alltoallv(spec(x, out, places(out, gaps)), spec(into, come, places(come, gaps[::-1])))
    elif kind == "Allgatherv":
        each = lengths[0].tolist()
        comm.Allgatherv([x, each[rank], MPI.DOUBLE], spec(into, each, places(each, gaps)))
    elif kind == "Gatherv":
        each = lengths[0].tolist()
        comm.Gatherv(x[: each[rank]], spec(into, each, places(each, gaps)) if rank == root else None, root)
    else:
        each = lengths[0].tolist()
        comm.Scatterv(spec(x, each, places(each, gaps)) if rank == root else None, into[: each[rank]], root)
    assert n == len(out)


def counted(comm: blinkmpi.Communicator) -> Any:
    """What a communicator has counted."""
    found = comm.stats()
    return [sorted(map(repr, each)) for each in (found.collectives, found.protocols, found.trees, found.links)]


def some_lengths(n: int, most: int) -> Iterator[Matrix]:
    """Lengths, some of them none."""
    rng = np.random.default_rng(7)
    for turn in range(12):
        yield rng.integers(0, most + 1, (n, n)) * (rng.random((n, n)) < (0.7, 1.0)[turn % 2])


@pytest.mark.parametrize("most", [20, 40_000], ids=["short", "long"])
@pytest.mark.parametrize("kind", ["Alltoallv", "Allgatherv", "Gatherv", "Scatterv"])
@mpi(ranks=(2, 3), timeout=100)
def test_other_lengths_and_places_are_found_by_c(comm: MPI.Intracomm, kind: str, most: int) -> None:
    n = comm.size
    with blinkmpi.Communicator(comm, executor="c") as ours, blinkmpi.Communicator(comm, executor="c") as python:
        python._dispatcher().repeated._keep_kind = None
        by_python: list[int] = []
        before = ours._dispatcher().call
        ours._dispatcher().call = lambda *a: by_python.append(1) or before(*a)  # type: ignore[method-assign, func-returns-value]
        made_by_python = []
        for form in FORMS:
            for turn, lengths in enumerate(some_lengths(n, most)):
                gaps, root = [turn % 3] * n, turn % 2
                results = [np.full(ROOM, -1.0) for _ in range(3)]
                for each, into in zip((ours, python, comm), results, strict=True):
                    made(each, kind, form, lengths, gaps, root, into)
                assert (results[0] == results[2]).all()
                assert (results[1] == results[2]).all()
            made_by_python.append(len(by_python))
        assert by_python, "the first of each kind"
        assert all(calls <= 6 * (i + 1) for i, calls in enumerate(made_by_python)), made_by_python
        # what is counted is the same
        assert counted(ours) == counted(python)


@mpi(ranks=(2, 3), timeout=60)
def test_what_is_wrong_with_other_lengths_is_said_as_ever(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, executor="c", timeout=20) as ours:
        x, y = np.arange(100.0), np.zeros(100)

        def call(out: list[int], come: list[int], displs: list[int] | None = None, to: Array = y) -> None:
            ours.Alltoallv([x, out, places(out, [0] * n), MPI.DOUBLE],
                           [to, come, displs or places(come, [0] * n), MPI.DOUBLE])  # fmt: skip

        def right(count: int) -> None:
            y[:] = -1
            call([count] * n, [count] * n)
            assert (y[: count * n] == np.tile(x[rank * count : rank * count + count], n)).all()

        for count in (3, 4, 5):
            right(count)
        # rank 0 expects one more of rank 1 than that sends
        more = [6, 7, *[6] * (n - 2)] if rank == 0 else [6] * n
        with pytest.raises(ArgumentError if rank == 0 else RemoteError, match="rank 1 sends 6 elements to rank 0"):
            call([6] * n, more)
        right(7)
        wrong: dict[str, Callable[[], None]] = {
            "fewer": lambda: call([-1, *[4] * (n - 1)], [4] * n),
            "beyond": lambda: call([200, *[4] * (n - 1)], [4] * n),
            "overlap": lambda: call([4] * n, [4] * n, [0, 2, *range(20, 20 + 4 * (n - 2), 4)]),
            "itself": lambda: call([4] * n, [4] * n, to=x),
            "own": lambda: call([5, *[4] * (n - 1)], [4] * n) if rank == 0 else call([4] * n, [5, *[4] * (n - 1)]),
        }
        for name, work in wrong.items():
            with pytest.raises(BlinkError):
                work() if rank == 0 or name == "own" else call([4] * n, [4] * n)
            right(8)


@mpi(ranks=(2,), timeout=60)
def test_a_rank_that_comes_late_to_such_a_call_is_waited_for(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, executor="c") as ours:
        x, y = np.arange(100.0), np.zeros(100)
        for count in (3, 4, 5, 6):
            if comm.rank == 1 and count > 4:
                comm.Barrier()
            elif count > 4:
                comm.Barrier()
                time.sleep(1.2)
            ours.Alltoallv([x, [count] * 2], [y, [count] * 2])
            assert (y[: 2 * count] == np.tile(x[comm.rank * count : (comm.rank + 1) * count], 2)).all()


EQUAL: dict[str, Callable[[Array, int, int], Any]] = {  # of equal blocks, as one may say that
    "an array": lambda x, count, n: x[: count * n],
    "a count": lambda x, count, n: [x, count],
    "a count and a type": lambda x, count, n: (x, count, MPI.DOUBLE),
    "a count and a step": lambda x, count, n: [x, (count, count + 1)],
    "counts": lambda x, count, n: [x, [count] * n],
    "counts and a step": lambda x, count, n: [x, [count] * n, count + 1, MPI.DOUBLE],
    "counts in an array": lambda x, count, n: [x, np.full(n, count)],
    "counts and displacements": lambda x, count, n: [x, ([count] * n, tuple(range(0, n * count + n, count + 1))[:n])],
}


@pytest.mark.parametrize("kind", ["Alltoallv", "Allgatherv", "Gatherv", "Scatterv"])
@mpi(ranks=(1, 2, 3), timeout=60)
def test_calls_of_nothing_say_nothing_of_later_ones(comm: MPI.Intracomm, kind: str) -> None:
    """The first call of a form has no element: from that C cannot see how it reads the form."""
    rank, n = comm.rank, comm.size
    x = np.arange(100.0) + 100 * rank
    for form, root in itertools.product(EQUAL, range(n)):
        with blinkmpi.Communicator(comm, executor="c") as ours:
            for count in (0, 0, 1, 2, 0, 3, 1):
                found = []
                for each in ours, comm:
                    y, blocks, one = np.full(100, -1.0), partial(EQUAL[form], count=count, n=n), x[:count]
                    if kind == "Alltoallv":
                        each.Alltoallv(blocks(x), blocks(y))
                    elif kind == "Allgatherv":
                        each.Allgatherv(one, blocks(y))
                    elif kind == "Gatherv":
                        each.Gatherv(one, blocks(y) if rank == root else None, root)
                    else:
                        each.Scatterv(blocks(x) if rank == root else None, y[:count], root)
                    found.append(y)
                assert (found[0] == found[1]).all(), (form, root, count)


@mpi(ranks=(2,), timeout=60)
def test_what_a_rank_passes_beside_the_root_is_not_looked_at(comm: MPI.Intracomm) -> None:
    """As MPI has it: the receive buffer of a Gatherv matters at its root alone, and so does what a Scatterv sends."""
    rank, x = comm.rank, np.arange(100.0)
    with blinkmpi.Communicator(comm, executor="c") as ours:
        for count in (0, 0, 1, 2, 0, 3):
            y, z = np.full(100, -1.0), np.full(count, -1.0)
            ours.Gatherv(x[:count], [y, [count] * 2] if rank == 0 else y[:count], 0)
            ours.Scatterv([x, [count] * 2] if rank == 0 else x[:count], z, 0)
            assert (y[: 2 * count] == np.tile(x[:count], 2) if rank == 0 else y == -1).all()
            assert (z == x[rank * count : (rank + 1) * count]).all()
