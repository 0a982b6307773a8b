"""Run one row: check the results, then time the libraries in turn on the same buffers.

Each iteration is timed alone, between MPI's own barriers on the job's
communicator; with a peer the libraries alternate iteration by iteration, never
at once, and an untimed call of its own goes before each timed one: as in a
program that uses one library, it finds caches and buffers as it left them, not
as the other did. The MPI module comes in as an argument.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .bench_case import Case, count_wrong, fill, poison
from .numerics import Array, dtype_of
from .program import REDUCTIONS

ROW_SECONDS = 3.0
DEFAULT_ITERATIONS = 20
FEWEST = 5
METHODS: dict[str, str] = {
    "allreduce": "Allreduce",
    "allgather": "Allgather",
    "reduce_scatter": "Reduce_scatter_block",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """How to time.

    ``average`` None is the median over iterations of the slowest rank's time; otherwise the mean over iterations,
    and over ranks as nccl-tests' -a: 0 rank 0, 1 average, 2 minimum, 3 maximum.
    """

    iterations: int | None = None  # None: 20, fewer where a row would take longer than ROW_SECONDS
    warmup: int = 1
    aggregate: int = 1
    checks: int = 1
    average: int | None = None
    cpu_time: bool = False

    @property
    def wanted(self) -> int:
        """Iterations of a row that is not too long."""
        return self.iterations or DEFAULT_ITERATIONS


@dataclass(frozen=True, slots=True)
class Measured:
    """One library on one row. Times in microseconds; ``wrong`` is None when not checked."""

    time_us: float
    slowest_us: tuple[float, ...]  # per iteration, of the slowest rank
    by_rank_us: tuple[float, ...]  # mean over iterations
    wrong: int | None

    @property
    def spread(self) -> list[float]:
        """Minimum, median and maximum over the iterations of the slowest rank's time."""
        return [min(self.slowest_us), median(self.slowest_us), max(self.slowest_us)]


class Buffers:
    """The send and the receive buffer of this rank, used by every row and every library."""

    def __init__(self, cases: Sequence[Case], *, unalign: int = 0) -> None:
        send, recv = self.needs(cases)
        self._send, self._recv = (np.empty(size + unalign * 16, np.uint8) for size in (send, recv))
        self._unalign = unalign

    @staticmethod
    def needs(cases: Sequence[Case]) -> tuple[int, int]:
        """Bytes of the two buffers that ``cases`` need: in place, the receive buffer holds the larger vector."""
        return max(c.send_count * c.itemsize for c in cases), max(c.size for c in cases)

    def views(self, case: Case) -> tuple[Array, Array]:
        """Send and receive buffer of ``case``, ``unalign`` elements into the memory."""
        first = self._unalign * case.itemsize
        send = self._send[first : first + case.send_count * case.itemsize]
        recv = self._recv[first : first + case.size]
        return send.view(dtype_of(case.dtype)), recv.view(dtype_of(case.dtype))


class Layout:
    """Where a row's input lies, what is passed to the library, and where the result will be.

    In place is MPI's in place. A broadcast has one buffer: out of place the root uses its send buffer.
    """

    def __init__(self, case: Case, rank: int, buffers: Buffers, *, in_place: bool, marker: Any) -> None:
        send, recv = buffers.views(case)
        kind, count = case.collective, case.count
        root = rank == case.root
        self.case, self.rank = case, rank
        self.inputs: list[Array] = []
        self.result: Array | None = recv[: case.recv_count]
        source: Any = send
        target: Any = self.result
        if kind == "broadcast":
            source = target = send if root and not in_place else recv
            self.inputs = [source] if root else []
            self.result = source
        elif kind in ("reduce", "gather") and not root:
            self.inputs, self.result, target = [send], None, None
        elif kind == "scatter":
            self.inputs, source = ([send], send) if root else ([], None)
            if root and in_place:
                self.result, target = send[rank * count : (rank + 1) * count], marker
        elif in_place:
            own = recv[rank * count : (rank + 1) * count] if kind in ("allgather", "gather") else recv
            self.inputs, source = [own], marker
            target = recv
        else:
            self.inputs = [send]
        self.touched = [b for b in (source, target) if isinstance(b, np.ndarray)]
        self.arguments: tuple[Any, ...] = (source,) if kind == "broadcast" else (source, target)

    def prepare(self) -> None:
        """Poison the buffers, then write this rank's input."""
        for buffer in self.touched:
            poison(buffer)
        for buffer in self.inputs:
            fill(buffer, self.rank, self.case.dtype)

    def calm(self) -> None:
        """Fill the buffers with zeros, which repeated reductions in place leave as they are."""
        for buffer in self.touched:
            buffer[:] = 0

    def wrong(self) -> int:
        """Wrong elements of this rank's result."""
        return 0 if self.result is None else count_wrong(self.case, self.rank, self.result)


def call_facts(case: Case) -> dict[str, Any]:
    """What besides collective and size says which call it is; operation and root only where the call has them."""
    facts: dict[str, Any] = {"dtype": case.dtype}
    if case.op:
        facts["op"] = case.op
    if case.root >= 0:
        facts["root"] = case.root
    return facts


def our_call(comm: Any, layout: Layout) -> Callable[[], Any]:
    """The call on our communicator, operations by name."""
    case = layout.case
    method = getattr(comm, METHODS[case.collective])
    keywords = {name: value for name, value in call_facts(case).items() if name != "dtype"}
    return lambda: method(*layout.arguments, **keywords)


def mpi_refusal(case: Case) -> str | None:
    """Why MPI itself cannot run ``case``, or None."""
    if case.op == "avg":
        return "MPI has no average"
    if case.collective in REDUCTIONS and case.dtype in ("float16", "bfloat16"):
        return "MPI has no reduction of 16-bit floats"
    return None


def mpi_call(world: Any, mpi: Any, layout: Layout) -> Callable[[], Any]:
    """MPI's own collective on the same buffers; what is only moved goes as bytes."""
    case = layout.case
    keywords: dict[str, Any] = {"op": getattr(mpi, case.op.upper())} if case.op else {}
    if case.root >= 0:
        keywords["root"] = case.root
    arguments = layout.arguments
    if not case.op:
        arguments = tuple([a.view(np.uint8), mpi.BYTE] if isinstance(a, np.ndarray) else a for a in arguments)
    method = getattr(world, METHODS[case.collective])
    return lambda: method(*arguments, **keywords)


def measure(world: Any, mpi: Any, layout: Layout, calls: Sequence[Callable[[], Any]], timing: Timing) -> list[Measured]:
    """Time ``calls`` in turn, then check each; collective over ``world``."""
    layout.prepare()
    if any(a is mpi.IN_PLACE for a in layout.arguments):
        layout.calm()
    with np.errstate(all="ignore"):
        times = _time(world, mpi, calls, timing)
        wrong = [_check(world, layout, call, timing.checks) for call in calls]
    everyone = np.empty((world.Get_size(), *times.shape))
    world.Allgather(times, everyone)
    everyone *= 1e6 / timing.aggregate
    return [_summary(everyone[:, i], wrong[i], timing.average) for i in range(len(calls))]


def _time(world: Any, mpi: Any, calls: Sequence[Callable[[], Any]], timing: Timing) -> Array:
    """Seconds of this rank, by library and iteration."""
    for call in calls:
        for _ in range(timing.warmup):
            call()
    iterations = timing.wanted
    if timing.iterations is None:
        for call in calls:  # an unreported call of each library says how many iterations fit
            seconds = world.allreduce(_once(world, call, timing.aggregate, time.perf_counter), op=mpi.MAX)
            fit = int(ROW_SECONDS / max(seconds, 1e-9))
            iterations = min(iterations, max(FEWEST, fit))
    clock = time.process_time if timing.cpu_time else time.perf_counter
    times = np.empty((len(calls), iterations))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(iterations):
            for k, call in enumerate(calls):
                if len(calls) > 1:
                    call()
                times[k, i] = _once(world, call, timing.aggregate, clock)
    finally:
        if collecting:
            gc.enable()
    return times


def _once(world: Any, call: Callable[[], Any], aggregate: int, clock: Callable[[], float]) -> float:
    world.Barrier()
    start = clock()
    for _ in range(aggregate):
        call()
    return clock() - start


def _check(world: Any, layout: Layout, call: Callable[[], Any], checks: int) -> int | None:
    """Wrong elements on all ranks in ``checks`` calls on poisoned buffers; None for no check."""
    if not checks:
        return None
    wrong = 0
    for _ in range(checks):
        layout.prepare()
        call()
        wrong += layout.wrong()
    return int(world.allreduce(wrong))


def _summary(times: Array, wrong: int | None, average: int | None) -> Measured:
    slowest = times.max(axis=0)
    by_rank = times.mean(axis=1)
    if average is None:
        reported = float(np.median(slowest))
    else:
        reported = float((by_rank[0], by_rank.mean(), by_rank.min(), by_rank.max())[average])
    return Measured(reported, tuple(slowest.tolist()), tuple(by_rank.tolist()), wrong)
