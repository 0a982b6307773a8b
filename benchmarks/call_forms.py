"""Calls as programs write them, for small_calls.py: other forms of buffers, lengths in a cycle, requests.

A row is a loop of one call, ours and plain mpi4py's in turn on the same buffers, and its time is that of one call: the
loop's on the slowest rank. What both leave in the buffers is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

FORM_SIZES = (32, 4 << 10, 128 << 10, 1 << 20, 8 << 20)  # bytes in all
CYCLES = (10, 100, 1000, 5000)  # different lengths
PIECES = 32  # broadcasts that are begun before the first is waited for
LOOP_S = 0.003  # that a loop takes about
Array = NDArray[Any]


class Form(NamedTuple):
    """A call as it is written."""

    name: str
    size: int  # bytes
    run: Callable[[Any], object]  # of a communicator; None of plain mpi4py's has a timeout
    results: Sequence[Array]
    calls: int = 1  # that `run` makes, if its time is that of one


def forms(world: Any, sizes: Sequence[int]) -> Iterator[Form]:
    """All rows; those of a size together."""
    for size in sizes:
        yield from _of_size(world, size)
    for lengths in CYCLES:
        vectors = [np.zeros(1 + i % lengths) for i in range(lengths)]

        def cycle(comm: Any, vectors: Sequence[Array] = vectors) -> None:
            for x in vectors:
                comm.Allreduce(MPI.IN_PLACE, x)

        yield Form(f"Allreduce, {lengths} lengths from 8 B on, in turn", FORM_SIZES[0], cycle, vectors, calls=lengths)


def _of_size(world: Any, size: int) -> Iterator[Form]:
    n, rank, double = world.size, world.rank, MPI.DOUBLE
    part = max(size // 8 // n, 1)
    x, y = np.full(max(size // 8, 1), rank + 1.0), np.zeros(max(size // 8, 1))
    block, whole, other = np.full(part, rank + 1.0), np.arange(part * n) + float(rank), np.zeros(part * n)
    counts, displs = [part] * n, [part * r for r in range(n)]
    all_blocks = [whole, counts, displs, double]

    def form(name: str, run: Callable[[Any], object], *results: Array) -> Form:
        return Form(name, size, run, results)

    yield form("Allreduce of arrays", lambda c: c.Allreduce(x, y), y)
    yield form("Allreduce of [array, type]", lambda c: c.Allreduce([x, double], [y, double]), y)
    yield form("Allreduce of memoryviews", lambda c: c.Allreduce(memoryview(x), memoryview(y)), y)
    yield form("Allreduce into a new array", lambda c: c.Allreduce(x, np.empty_like(y)))
    yield form("Allreduce, timeout=", lambda c: c.Allreduce(x, y, **_timeout(c, world)), y)
    if (tensors := _tensors(x, y)) is not None:
        yield form("Allreduce of torch tensors", lambda c: c.Allreduce(*tensors), y)
    yield form("Bcast of [array, type]", lambda c: c.Bcast([x, double], root=0), x)
    yield form("Allgatherv", lambda c: c.Allgatherv(block, [other, counts, displs, double]), other)
    yield form("Gatherv", lambda c: c.Gatherv(block, [other, counts, displs, double], root=0), other)
    yield form("Scatterv", lambda c: c.Scatterv(all_blocks, block, root=0), block)
    yield form("Alltoallv", lambda c: c.Alltoallv(all_blocks, [other, counts, displs, double]), other)
    yield form("Reduce_scatter with counts", lambda c: c.Reduce_scatter(whole, block, counts), block)
    yield form("Iallreduce + Wait", lambda c: c.Iallreduce(x, y).Wait(), y)
    pieces = np.array_split(np.full(max(size, PIECES), rank, np.uint8), PIECES)
    yield form(f"{PIECES} Ibcast + Waitall", lambda c: MPI.Request.Waitall([c.Ibcast(p) for p in pieces]), *pieces)
    token = np.zeros(1)

    def mixed(comm: Any) -> None:
        requests = [
            comm.Iallreduce(x, y), world.Irecv(token, (rank - 1) % n), world.Isend(block[:1], (rank + 1) % n),
            comm.Ibarrier(),
        ]  # fmt: skip
        for _ in requests:
            MPI.Request.Waitany(requests)

    yield form("Waitany of four, two of which are mpi4py's", mixed, y, token)


def _timeout(comm: Any, world: Any) -> dict[str, float]:
    return {} if comm is world else {"timeout": 30.0}


def _tensors(*arrays: Array) -> tuple[Any, ...] | None:
    try:
        import torch
    except ImportError:
        return None
    return tuple(map(torch.from_numpy, arrays))


def measure(world: Any, ours: Any, form: Form, rounds: int) -> dict[str, Any]:
    """The times of a form, of each round, and how many elements differ between the two libraries' results."""
    sides = {"ours": ours, "mpi": world}
    wrong = _differ(world, form, sides)
    took = {name: _loop(world, partial(form.run, comm), 3) for name, comm in sides.items()}
    loops = max(int(LOOP_S / max(took.values())), 1)
    found: dict[str, Any] = {"collective": form.name, "size": form.size, "place": "", **{name: [] for name in sides}}
    for i in range(rounds):
        for name in sorted(sides, reverse=bool(i % 2)):
            us = _loop(world, partial(form.run, sides[name]), loops) * 1e6 / form.calls
            found[name].append({"us": us, "wrong": wrong if name == "ours" and not i else 0})
    return found


def _loop(world: Any, run: Callable[[], object], loops: int) -> float:
    """Seconds of one run, on the slowest rank."""
    world.Barrier()
    began = time.perf_counter()
    for _ in range(loops):
        run()
    return float(world.allreduce((time.perf_counter() - began) / loops, MPI.MAX))


def _differ(world: Any, form: Form, sides: dict[str, Any]) -> int:
    before = [x.copy() for x in form.results]
    after: list[list[Array]] = []
    for comm in sides.values():
        for x, old in zip(form.results, before, strict=True):
            x[:] = old
        form.run(comm)
        after.append([x.copy() for x in form.results])
    wrong = sum(int((a != b).sum()) for a, b in zip(*after, strict=True))
    return int(world.allreduce(wrong))
