"""Calls whose counts differ from call to call: C makes them, and they are what Python would have made."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, CollectiveTimeout, MismatchError
from blinkmpi.topology import machine, modify
from tests.harness import long_but, mpi

Array = np.ndarray[Any, Any]
ROOM = 600_000  # elements of a buffer
DGX1 = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6"}  # parts of a DGX-1V, by ranks
HOW: dict[str, Callable[[int], dict[str, Any]]] = {
    "default": lambda n: {},
    "ours": lambda n: {"algo": ";".join(f"{name}:^mpi" for name in ("allreduce", "reduce", "broadcast"))},
    "trees": lambda n: {"topology": modify(machine("dgx-1v"), gpus=DGX1[n])},
}
Call = Callable[[Any, Array, Array, int], object]
CALLS: dict[str, Call] = {
    "Allreduce": lambda c, x, y, k: c.Allreduce(x[:k], y[:k]),
    "Allreduce in place": lambda c, x, y, k: c.Allreduce(MPI.IN_PLACE, put(y, x, k)),
    "Allreduce of types": lambda c, x, y, k: c.Allreduce([x, k, TYPES[x.dtype.char]], [y, k, TYPES[x.dtype.char]]),
    "Iallreduce": lambda c, x, y, k: c.Iallreduce(x[:k], y[:k], MPI.MAX).Wait(),
    "Bcast": lambda c, x, y, k: c.Bcast(put(y, x, k), 1),
    "Reduce": lambda c, x, y, k: c.Reduce(x[:k], y[:k] if c.rank == 1 else None, MPI.SUM, 1),
    "Allgather": lambda c, x, y, k: c.Allgather(x[:k], y[: c.size * k]),
    "Allgather in place": lambda c, x, y, k: c.Allgather(MPI.IN_PLACE, put(y, x, c.size * k)),
    "Gather": lambda c, x, y, k: c.Gather(x[:k], y[: c.size * k] if c.rank == 1 else None, 1),
    "Scatter": lambda c, x, y, k: c.Scatter(x[: c.size * k] if c.rank == 1 else None, y[:k], 1),
    "Reduce_scatter_block": lambda c, x, y, k: c.Reduce_scatter_block(x[: c.size * k], y[:k]),
    "Alltoall": lambda c, x, y, k: c.Alltoall(x[: c.size * k], y[: c.size * k]),
    "Alltoall in place": lambda c, x, y, k: c.Alltoall(MPI.IN_PLACE, put(y, x, c.size * k)),
    "Scan": lambda c, x, y, k: c.Scan(x[:k], y[:k]),
    "Exscan": lambda c, x, y, k: c.Exscan(x[:k], y[:k]),
}
TYPES = {"d": MPI.DOUBLE, "f": MPI.FLOAT, "h": MPI.SHORT, "q": MPI.INT64_T}
USUAL = ("Allreduce", "Iallreduce", "Bcast", "Allgather", "Alltoall")


def put(y: Array, x: Array, k: int) -> Array:
    y[:k] = x[:k]
    return y[:k]


def counted(comm: blinkmpi.Communicator) -> Any:
    """What a communicator has counted."""
    found = comm.stats()
    return [sorted(map(repr, each)) for each in (found.collectives, found.protocols, found.trees, found.links)]


def counts_for(n: int, seed: int) -> list[int]:
    """Counts of one seed on every rank: short ones, and of each size some."""
    rng = random.Random(seed)
    most = ROOM // n
    short = (rng.randrange(1, most >> rng.randrange(17) or 2) for _ in range(40))
    long = (rng.randrange(most >> 7, most >> rng.randrange(6)) for _ in range(24))
    return [*range(1, 9), *short, *long, most, *(most >> i for i in range(12))]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("calls", long_but(("usual",), ("usual", "others")))
@mpi(ranks=(2, 3), timeout=250)
def test_other_counts_are_made_by_c_as_by_python(comm: MPI.Intracomm, calls: str, how: str) -> None:
    options, dtypes = HOW[how](comm.size), ("d", "h") if how == "default" else ("f",)
    for name, call in CALLS.items():
        if (name in USUAL) == (calls == "usual"):
            for dtype in dtypes:
                compare(comm, name, call, options, dtype)


def compare(comm: MPI.Intracomm, name: str, call: Call, options: dict[str, Any], dtype: str) -> None:
    with blinkmpi.Communicator(comm, executor="c", **options) as ours, blinkmpi.Communicator(comm, **options) as python:
        python._dispatcher().repeated._keep_counts = None
        if comm.rank == comm.size - 1:  # so ranks make the same call each in its way
            ours._dispatcher().repeated._keep_counts = None
        x = (np.arange(ROOM) % 251 + comm.rank).astype(dtype)
        for count in counts_for(comm.size, 7):
            results = [np.full(ROOM, -1, dtype) for _ in range(3)]
            for each, y in zip((ours, python, comm), results, strict=True):
                call(each, x, y, count)
            assert (results[0] == results[2]).all(), (name, dtype, count)
            assert (results[1] == results[2]).all(), (name, dtype, count)
        assert counted(ours) == counted(python), name


@pytest.mark.parametrize("name", [name for name in CALLS if "place" not in name])
@mpi(ranks=(2, 4), timeout=100)
def test_few_calls_of_other_counts_come_to_python(comm: MPI.Intracomm, name: str) -> None:
    with blinkmpi.Communicator(comm, executor="c") as ours:
        by_python: list[int] = []
        dispatcher = ours._dispatcher()
        begin, call = dispatcher.start, dispatcher.call
        dispatcher.start = lambda *a: by_python.append(1) or begin(*a)  # type: ignore[method-assign, func-returns-value]
        dispatcher.call = lambda *a: by_python.append(1) or call(*a)  # type: ignore[method-assign, func-returns-value]
        x, y = np.ones(ROOM), np.empty(ROOM)
        counts = counts_for(comm.size, 11)
        for count in counts:
            CALLS[name](ours, x, y, count)
        rows = len(ours.plan(ours_name(name)).rules)
        assert len(by_python) < min(len(counts) // 2, 2 + 4 * rows), (len(by_python), rows)


def ours_name(name: str) -> str:
    plain = name.removeprefix("I").partition(" ")[0].lower()
    return {"bcast": "broadcast", "reduce_scatter_block": "reduce_scatter"}.get(plain, plain)


@mpi(ranks=(2, 3), timeout=60)
def test_what_is_wrong_with_other_counts_is_said_as_ever(comm: MPI.Intracomm) -> None:
    x, y = np.ones(1000), np.empty(1000)
    with blinkmpi.Communicator(comm, executor="c", timeout=20) as ours:

        def right(count: int) -> None:
            y[:] = -1
            ours.Allreduce(x[:count], y[:count])
            assert (y[:count] == comm.size).all()
            assert (y[count:] == -1).all()

        for count in range(3, 9):
            right(count)
        count = 21 if comm.rank == 1 else 20
        with pytest.raises(MismatchError, match=r"20 x float64.*21 x float64|21 x float64.*20 x float64"):
            ours.Allreduce(x[:count], y[:count])
        right(10)
        with pytest.raises(ArgumentError):  # on every rank
            ours.Allreduce(x[:15], y[:14])
        with pytest.raises(ArgumentError):
            ours.Allreduce(x[:15], x[5:20])
        right(11)
        if comm.rank > 0:
            comm.recv(source=0)
        with pytest.raises(CollectiveTimeout, match=r"allreduce\(33 x float64, op sum\)"):
            ours.Allreduce(x[:33], y[:33], timeout=0.5)
        for r in range(1, comm.size) if comm.rank == 0 else ():
            comm.send(None, r)


@mpi(ranks=(2, 3), timeout=60)
def test_calls_of_other_counts_are_under_way_together(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, executor="c") as ours:
        xs = [np.full(count, comm.rank + 1.0) for count in range(5, 905, 9)]
        ys = [np.zeros_like(x) for x in xs]
        for _ in range(3):
            requests = [ours.Iallreduce(x, y) for x, y in zip(xs, ys, strict=True)]
            MPI.Request.Waitall(requests)
            assert all((y == comm.size * (comm.size + 1) / 2).all() for y in ys)
            for y in ys:
                y[:] = 0
