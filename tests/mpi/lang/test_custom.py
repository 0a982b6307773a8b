"""Collectives of users' own, by what they begin and end with, on ranks: results, mistakes, nodes."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi import lang
from blinkmpi.errors import ArgumentError, BufferTypeError, MismatchError, RemoteError
from blinkmpi.lang import chunk, library
from tests.harness import mpi
from tests.mpi.test_nodes import split

TO_NEXT = lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(rank - 1, 0)]] if rank else [])
PAIR = lang.custom(given=lambda n, rank: 2 * (rank == 0), wanted=lambda n, rank: [[(0, 1)]] if rank == n - 1 else [])
# Rank r gets the fold of its own chunk 0 and its two neighbours', nothing, and its neighbour's chunk 1.
STENCIL = lang.custom(
    given=lambda n, rank: 2, wanted=lambda n, rank: [
        sorted({((rank + d) % n, 0) for d in (-1, 0, 1)}), [], [((rank + 1) % n, 1)]
    ],
)  # fmt: skip


@lang.algorithm(TO_NEXT, chunks=1)
def forward(n: int) -> None:
    for r in range(1, n):
        chunk(r - 1, "input", 0).copy(r, "output", 0)


@lang.algorithm(PAIR, chunks=1)
def pair(n: int) -> None:
    chunk(0, "input", 1).copy(n // 2, "on the way", 0).copy(n - 1, "output", 0)


@lang.algorithm(STENCIL, chunks=1)
def stencil(n: int) -> None:
    for r in range(n):
        at = chunk(r, "input", 0).copy(r, "sum", 0)
        for other in sorted({(r - 1) % n, (r + 1) % n} - {r}):
            at = at.reduce(chunk(other, "input", 0))
        at.copy(r, "output", 0)
        chunk((r + 1) % n, "input", 1).copy(r, "output", 2)


ALL_TO_NEXT = lang.custom(
    given=lambda n, rank: 4, wanted=lambda n, rank: [[(rank - 1, i)] for i in range(4 * (rank > 0))]
)
# Rank 0's chunk 0 twice, the fold of a rank's own two chunks, and of rank 0's two, twice.
REPEATED = lang.custom(
    given=lambda n, rank: 2, wanted=lambda n, rank: [[(0, 0)]] * 2 + [[(rank, 0), (rank, 1)]] + [[(0, 0), (0, 1)]] * 2
)


@lang.algorithm(ALL_TO_NEXT, chunks=4)
def to_next(n: int) -> None:
    for r in range(1, n):
        chunk(r - 1, "input", 0, 2).copy(r, "output", 0)
        chunk(r - 1, "input", 2, 2).copy(r, "output", 2)


@lang.algorithm(REPEATED, chunks=1)
def repeated(n: int) -> None:
    for r in range(n):
        chunk(r, "input", 0).copy(r, "output", 2).reduce(chunk(r, "input", 1))
    for r in range(n):
        for i in (0, 1):
            chunk(0, "input", 0).copy(r, "output", i)
            chunk(0, "output", 2).copy(r, "output", 3 + i)


def value(rank: int, part: int, count: int, dtype: str) -> Any:
    return ((np.arange(count) * 3 + rank * 5 + part) % 4 + 1).astype(dtype)


def run_each(comm: blinkmpi.Communicator, count: int, dtype: str, op: str = "sum") -> None:
    """Every collective with some counts; whatever is not wanted in a result stays."""
    n, rank = comm.size, comm.rank
    for made in (forward(n), pair(n), stencil(n), to_next(n), repeated(n)):
        goal = made.flow.goal
        given, wanted = goal.given[rank], goal.wanted[rank]
        send = np.concatenate([value(rank, c, count, dtype) for c in range(given)]) if given else None
        recv = np.full(len(wanted) * count, 9, dtype) if wanted else None
        comm.Custom(made, send, recv, op)
        comm.Custom(made, send, recv, op)  # found again
        for i, want in enumerate(wanted):
            assert recv is not None
            parts = [value(r, c, count, dtype) for r, c in want]
            folded = {"sum": np.add, "max": np.maximum}[op].reduce(parts) if parts else np.full(count, 9, dtype)
            assert (recv[i * count : (i + 1) * count] == folded).all(), (made.name, rank, i)


@mpi(ranks=(2, 4), timeout=120)
def test_custom_collectives(comm: MPI.Intracomm) -> None:
    for executor in ("auto", "numpy"):
        with blinkmpi.Communicator(comm, executor=executor) as ours:
            for count, dtype, op in ((1, "int32", "sum"), (1001, "float32", "max"), (70_000, "float64", "sum")):
                run_each(ours, count, dtype, op)
            run_each(ours, 0, "float32")
    if comm.size == 4:
        with split(comm, "1+3") as ours:
            run_each(ours, 5000, "float32")
        what_does_not_fit_is_refused_on_every_rank(comm)


def what_does_not_fit_is_refused_on_every_rank(comm: MPI.Intracomm) -> None:
    n, rank = comm.size, comm.rank
    data, room = np.ones(6, np.float32), np.zeros(9, np.float32)
    own = (ArgumentError, BufferTypeError, RemoteError)
    with blinkmpi.Communicator(comm) as ours:
        for algorithm, send, recv, text in (
            (library.ring(n), data, data.copy(), "expected an algorithm of a collective that lang.custom"),
            (stencil(n + 1), data, room, "stencil is for 5 ranks, the communicator has 4"),
            (stencil(n), np.ones(7, np.float32), room, "has 7 elements, no multiple of its 2 chunks"),
            (stencil(n), data, np.zeros(6, np.float32), "2 chunks of 3 x float32 and 3 chunks of 2 x float32"),
            (stencil(n), data, np.zeros(9, np.int32), "2 chunks of 3 x float32 and 3 chunks of 3 x int32"),
            (stencil(n), None, room, "is never in place"),
            (stencil(n), room[:6], room, "overlap"),
        ):
            with pytest.raises(own, match=text):
                ours.Custom(algorithm, send, recv)
            with pytest.raises(own):  # wrong on one rank alone
                ours.Custom(algorithm if rank == 1 else stencil(n), send if rank == 1 else data, recv)
        with pytest.raises(own, match="avg"):
            ours.Custom(stencil(n), data, room, "avg")
        send = np.ones(2, np.float32) if rank == 0 else None
        with pytest.raises(own, match=r"the ranks' chunks have 1 x float32, 2 x float32|no multiple"):
            ours.Custom(pair(n), send, np.zeros(2, np.float32) if rank == n - 1 else None)
        run_each(ours, 10, "float32")
    with blinkmpi.Communicator(comm) as ours, pytest.raises(MismatchError, match="stencil#"):
        ours.Custom(stencil(n), data[: 4 if rank == 2 else 6], room[: 6 if rank == 2 else 9])
