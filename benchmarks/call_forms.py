"""Calls as programs write them, beside plain mpi4py: ``python benchmarks/call_forms.py -np 4 -o forms-np4.json``.

Other forms of buffers, lengths that differ from call to call, requests, communicators, on CPU ranks of one host. A row
is a loop of one call, ours and plain mpi4py's in turn on the same buffers, and its time is that of one call: the loop's
on the slowest rank. Its ratio is the median of those of the rounds. What both leave in the buffers is compared.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import SETTINGS, load, mpirun, python_path, run_job  # noqa: E402
from benchmarks.small_calls import row_of  # noqa: E402

GOAL = 0.95  # of mpi4py's speed
SIZES = (32, 4 << 10, 128 << 10, 1 << 20, 8 << 20)  # bytes in all
NEW_LENGTHS = 10_000  # more than are kept
CYCLES = (10, 100, 1000, 5000)  # different lengths
COUNTS = 64  # different ones, in turn
PIECES = 32  # broadcasts that are begun before the first is waited for
PIPELINE = (32, 4 << 10, 32 << 10, 256 << 10, 1 << 20)  # bytes of a broadcast of a pipeline
DEEP, IN_PIPELINE = 4, 64  # broadcasts under way in it, and in all
LOOP_S = 0.003  # that a loop takes about
Array = NDArray[Any]


class Form(NamedTuple):
    """A call as it is written."""

    name: str
    size: int  # bytes
    run: Callable[[Any], object]  # of a communicator, ours or mpi4py's
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

        yield Form(f"Allreduce, {lengths} lengths from 8 B on, in turn", SIZES[0], cycle, vectors, calls=lengths)

    yield from _of_new_lengths(world)
    for size in SIZES[1:-1]:
        yield from _of_other_counts(world, size)
    for size in PIPELINE:
        yield from _pipelines(world, size)
    made: dict[str, Callable[[Any], Any]] = {"Split": lambda comm: comm.Split(0, comm.rank), "Dup": lambda comm: comm.Dup()}  # fmt: skip  # noqa: E501
    sent, received = np.ones(4), np.zeros(4)
    for name, make in made.items():

        def call(comm: Any, make: Callable[[Any], Any] = make) -> None:
            child = make(comm)
            child.Allreduce(sent, received)
            child.Free()

        yield Form(f"{name} + Free", SIZES[0], lambda c, make=make: make(c).Free(), ())
        yield Form(f"{name} + Allreduce + Free", SIZES[0], call, (received,))


def _of_new_lengths(world: Any) -> Iterator[Form]:
    """Calls of blocks whose lengths are others each time, as where particles move from rank to rank."""
    n, rank = world.size, world.rank
    rng = np.random.default_rng(3)
    x, y = np.arange(32.0 * n), np.zeros(32 * n)
    each, of_all = rng.integers(0, 33, (NEW_LENGTHS, n, n)), rng.integers(1, 33, (NEW_LENGTHS, n)).tolist()

    def exchange(comm: Any) -> None:
        for lengths in each:
            comm.Alltoallv([x, lengths[rank]], [y, lengths[:, rank]])

    def collect(comm: Any) -> None:
        for lengths in of_all:
            comm.Allgatherv([x, lengths[rank], MPI.DOUBLE], [y, lengths])

    yield Form("Alltoallv of new lengths", SIZES[0], exchange, (y,), calls=NEW_LENGTHS)
    yield Form("Allgatherv of new lengths", SIZES[0], collect, (y,), calls=NEW_LENGTHS)


def _of_other_counts(world: Any, size: int) -> Iterator[Form]:
    """Calls each of which has another count than the one before, of about this size in all."""
    n, most = world.size, size // 8
    x, y, every = np.ones(most), np.zeros(most), np.zeros(most)
    counts, parts = [most - i for i in range(COUNTS)], [most // n - i for i in range(COUNTS)]

    def each(run: Callable[[Any, int], object], counts: Sequence[int] = counts) -> Callable[[Any], None]:
        def all_of_them(comm: Any) -> None:
            for count in counts:
                run(comm, count)

        return all_of_them

    def form(name: str, run: Callable[[Any], object], *results: Array) -> Form:
        return Form(f"{name} of another count each time", size, run, results, calls=COUNTS)

    yield form("Allreduce", each(lambda c, k: c.Allreduce(x[:k], y[:k])), y)
    yield form("Iallreduce + Wait", each(lambda c, k: c.Iallreduce(x[:k], y[:k]).Wait()), y)
    yield form("Bcast", each(lambda c, k: c.Bcast(every[:k], root=0)), every)
    yield form("Allgather", each(lambda c, k: c.Allgather(x[:k], y[: n * k]), parts), y)


def _pipelines(world: Any, size: int) -> Iterator[Form]:
    """Broadcasts of which the oldest is waited for before the next one is begun."""
    buffers = [np.full(size, world.rank, np.uint8) for _ in range(DEEP)]

    def pipeline(comm: Any, roots: int) -> None:
        under_way: deque[Any] = deque()
        for i in range(IN_PIPELINE):
            if len(under_way) == DEEP:
                under_way.popleft().Wait()
            under_way.append(comm.Ibcast(buffers[i % DEEP], root=i % roots))
        for request in under_way:
            request.Wait()

    for name, roots in (("one root", 1), ("roots in turn", world.size)):
        run = partial(pipeline, roots=roots)
        yield Form(f"Ibcasts, {DEEP} under way, {name}", size, run, buffers, calls=IN_PIPELINE)


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


# ---------------------------------------------------------------- a rank, and the driver


def rank(rounds: int, only: str, to: Path) -> None:
    """Measure on all ranks the forms whose names have the word ``only``; rank 0 writes the file ``to``."""
    from blinkmpi.communicator import Communicator

    world = MPI.COMM_WORLD
    with Communicator(world) as comm:
        rows = [measure(world, comm, form, rounds) for form in forms(world, SIZES) if only in form.name]
        facts = {"rows": rows, **jobs.rank_facts(MPI, comm), "cores": len(os.sched_getaffinity(0))}
    if world.rank == 0:
        to.write_text(json.dumps(facts), encoding="utf-8")


def document(args: argparse.Namespace, found: dict[str, Any], began: datetime) -> dict[str, Any]:
    """The file."""
    about = {"rounds": args.rounds, "goal": GOAL, "oversubscribed": args.n > found["cores"], "load": os.getloadavg()[0]}
    head = {"call_forms": about, "env": found["env"]}
    statistic = "median over rounds of the slowest rank's time of one call in a loop"
    return jobs.document(head, [row_of(row) for row in found["rows"]], [], began, ranks=args.n, memory="host",
                         compare=["mpi"], statistic=statistic, versions=found["versions"],
                         machine=found["machine"])  # fmt: skip


def table(made: dict[str, Any]) -> str:
    """Ratios to mpi4py by form and size, our times below, and what lies below the goal."""
    rows = made["results"]
    sizes = sorted({row["size"] for row in rows})
    lines = [f"{'mpi4py / ours':>46}" + "".join(f"{size:>9}" for size in sizes)]
    for name in dict.fromkeys(row["collective"] for row in rows):
        own = {row["size"]: row for row in rows if row["collective"] == name}
        lines.append(f"{name:>46}" + "".join(f"{own[s]['ratio']:9.2f}" if s in own else " " * 9 for s in sizes))
        lines.append(f"{'us':>46}" + "".join(f"{own[s]['ours']['us']:9.1f}" if s in own else " " * 9 for s in sizes))
    ratios = [row["ratio"] for row in rows]
    below = sum(ratio < GOAL for ratio in ratios)
    lines.append(f"{len(rows)} rows, mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}, {below} below {GOAL}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calls as programs write them, beside plain mpi4py.")
    add = parser.add_argument
    add("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    add("--rounds", type=int, default=9, metavar="N", help="rounds of a row (default 9)")
    add("--only", default="", metavar="WORD", help="the rows whose names have it (default all)")
    add("--limit", type=float, default=300, metavar="SECONDS", help="for the job (default 300)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    add("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.n < 2:
        parser.error(f"-np {args.n}: take at least 2 ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named; 0 if all ended well and nothing was wrong."""
    args = arguments(argv)
    if args.rank is not None:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        rank(args.rounds, args.only, args.rank)
        faulthandler.cancel_dump_traceback_later()
        return 0
    began = datetime.now().astimezone()
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        file = Path(folder) / "rows.json"
        own = [str(Path(__file__).resolve()), "--rounds", str(args.rounds), "--only", args.only]
        own += ["--limit", str(args.limit)]
        argv_of_ranks = [*mpirun(args.n), sys.executable, *own, "--rank", str(file)]
        why, said = run_job(argv_of_ranks, {**SETTINGS, "PYTHONPATH": python_path()}, args.limit)
        found = load(file)
    if why or found is None:
        print(f"{said}\ncall_forms: error: {why or 'no result'}", file=sys.stderr)
        return 2
    if not found["rows"]:
        print(f"call_forms: error: no row has the word {args.only!r} in its name", file=sys.stderr)
        return 2
    made = document(args, found, began)
    print(table(made))
    if args.output:
        jobs.write(args.output, made)
    return int(any(row["ours"]["wrong"] for row in made["results"]))


if __name__ == "__main__":
    sys.exit(main())
