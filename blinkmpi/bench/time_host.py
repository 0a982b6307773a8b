"""Run one row on host memory: time the libraries in turn, then check the results of each.

Each iteration is timed alone, between MPI's own barriers on the job's
communicator; with a peer the libraries alternate iteration by iteration, never
at once, and an untimed call of its own goes before each timed one: as in a
program that uses one library, it finds caches and buffers as it left them, not
as the other did. The MPI module comes in as an argument.

What is common to host and GPU memory is here too: how a row's buffers lie, and
what a measurement is. :mod:`.bench_gpu` measures GPUs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ..program.reduction import Array, dtype_of
from .case import Case, count_wrong, fill, poison

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
    blocking: bool = False  # GPUs: wait for each call
    replays: int = 0  # GPUs: launches of a graph that holds the calls; 0: no graph

    @property
    def wanted(self) -> int:
        """Iterations of a row that is not too long."""
        return self.iterations or DEFAULT_ITERATIONS


@dataclass(frozen=True, slots=True)
class Measured:
    """One library on one row. Times in microseconds; ``wrong`` is None when not checked."""

    time_us: float
    slowest_us: tuple[float, ...]  # per iteration (GPUs: per repeat), of the slowest rank
    by_rank_us: tuple[float, ...]  # mean over iterations
    wrong: int | None
    calls: int = 1  # per element of slowest_us, which is the time of one
    host_us: float | None = None  # GPUs: what the host pays to start a call
    note: str | None = None  # what the library chose, if it says so

    @property
    def iterations(self) -> int:
        """Timed calls."""
        return len(self.slowest_us) * self.calls

    @property
    def spread(self) -> list[float]:
        """Minimum, median and maximum over the iterations of the slowest rank's time."""
        return [min(self.slowest_us), median(self.slowest_us), max(self.slowest_us)]


class Buffers:
    """The send and the receive buffer of this rank, used by every row and every library.

    Args:
        allocate: gives so many bytes, as an array of ``uint8`` of module ``xp``; called twice.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        unalign: int = 0,
        xp: Any = np,
        allocate: Callable[[int], Any] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        self._send, self._recv = (allocate(max(1, size + unalign * 16)) for size in self.needs(cases))
        self._unalign = unalign
        self.xp = xp

    @staticmethod
    def needs(cases: Sequence[Case]) -> tuple[int, int]:
        """Bytes of the two buffers that ``cases`` need: in place, the receive buffer holds the larger vector."""
        return max(c.send_count * c.itemsize for c in cases), max(c.size for c in cases)

    def views(self, case: Case) -> tuple[Any, Any]:
        """Send and receive buffer of ``case``, ``unalign`` elements into the memory."""
        first = self._unalign * case.itemsize
        send = self._send[first : first + case.send_count * case.itemsize]
        recv = self._recv[first : first + case.size]
        return send.view(dtype_of(case.dtype)), recv.view(dtype_of(case.dtype))


class Layout:
    """Where a row's input lies, what is passed to the library, and where the result will be.

    In place is MPI's in place, with ``marker`` for the other buffer; without a marker it is NCCL's: both buffers are
    passed, and a rank's part of a reduce-scatter stays where it lay. A broadcast has one buffer: out of place the
    root uses its send buffer.

    ``source`` and ``target`` are the buffers themselves, None where this rank has none.
    """

    def __init__(self, case: Case, rank: int, buffers: Buffers, *, in_place: bool, marker: Any = None) -> None:
        send, recv = buffers.views(case)
        kind, count = case.collective, case.count
        root = rank == case.root
        own = slice(rank * count, (rank + 1) * count)
        self.case, self.rank, self.xp = case, rank, buffers.xp
        self.in_place = in_place
        self.source: Any = send
        self.target: Any = recv[: case.recv_count]
        hidden = ""  # the argument that the marker replaces
        if kind == "broadcast":
            self.source = self.target = send if root and not in_place else recv
        elif kind in ("reduce", "gather") and not root:
            self.target = None
        elif kind == "scatter":
            if not root:
                self.source = None
            elif in_place:
                self.target, hidden = send[own], "target"
        elif in_place:
            self.source, hidden = (recv[own] if kind in ("allgather", "gather") else recv), "source"
            if kind == "reduce_scatter" and marker is None:
                self.target = recv[own]
        self.result = self.target
        self.inputs = [self.source] if self.source is not None and (kind != "broadcast" or root) else []
        whole = recv if in_place and hidden == "source" else self.target
        self.touched = list({id(b): b for b in (self.source, whole) if b is not None}.values())
        source, target = self.source, whole if marker is not None else self.target
        if marker is not None and hidden:
            source, target = (marker, target) if hidden == "source" else (source, marker)
        self.arguments: tuple[Any, ...] = (source,) if kind == "broadcast" else (source, target)

    def prepare(self) -> None:
        """Poison the buffers, then write this rank's input."""
        for buffer in self.touched:
            poison(buffer)
        for buffer in self.inputs:
            fill(buffer, self.rank, self.case.dtype, xp=self.xp)

    def calm(self) -> None:
        """Fill the buffers with zeros, which repeated reductions in place leave as they are."""
        for buffer in self.touched:
            buffer.view("u1")[:] = 0

    def wrong(self) -> int:
        """Wrong elements of this rank's result."""
        return 0 if self.result is None else count_wrong(self.case, self.rank, self.result, xp=self.xp)


@dataclass(frozen=True, slots=True)
class Lane:
    """One library on one row: its buffers and its call, which takes the stream on GPUs and nothing on the host."""

    layout: Layout
    call: Callable[..., Any]
    note: str | None = None


def call_facts(case: Case) -> dict[str, Any]:
    """What besides collective and size says which call it is; operation and root only where the call has them."""
    facts: dict[str, Any] = {"dtype": case.dtype}
    if case.op:
        facts["op"] = case.op
    if case.root >= 0:
        facts["root"] = case.root
    return facts


def our_call(comm: Any, layout: Layout, *, suffix: str = "") -> Callable[..., Any]:
    """The call on our communicator (with a suffix, another of its kind), operations by name; it takes more keywords."""
    case = layout.case
    method = getattr(comm, METHODS[case.collective] + suffix)
    keywords = {name: value for name, value in call_facts(case).items() if name != "dtype"}
    return partial(method, *layout.arguments, **keywords)


def measure(world: Any, mpi: Any, lanes: Sequence[Lane], timing: Timing) -> list[Measured]:
    """Time the libraries in turn, then check each; collective over ``world``."""
    for lane in lanes:
        ready(lane.layout)
    with np.errstate(all="ignore"):
        times = _time(world, mpi, [lane.call for lane in lanes], timing)
        wrong = [check(world, lane.layout, lane.call, timing.checks) for lane in lanes]
    everyone = gathered(world, times) * (1e6 / timing.aggregate)
    return [summary(everyone[:, i], wrong[i], timing.average) for i in range(len(lanes))]


def ready(layout: Layout) -> None:
    """Buffers for calls that are only timed."""
    layout.prepare()
    if layout.in_place:
        layout.calm()


def gathered(world: Any, times: Array) -> Array:
    """The times of all ranks, by rank."""
    everyone = np.empty((world.Get_size(), *times.shape))
    world.Allgather(np.ascontiguousarray(times), everyone)
    return everyone


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
    """Between two barriers: on crowded cores, what a rank does next would delay the end of another's call."""
    world.Barrier()
    start = clock()
    for _ in range(aggregate):
        call()
    seconds = clock() - start
    world.Barrier()
    return seconds


def check(world: Any, layout: Layout, call: Callable[[], Any], checks: int) -> int | None:
    """Wrong elements on all ranks in ``checks`` calls on poisoned buffers; None for no check."""
    if not checks:
        return None
    wrong = 0
    for _ in range(checks):
        layout.prepare()
        call()
        wrong += layout.wrong()
    return int(world.allreduce(wrong))


def summary(times: Array, wrong: int | None, average: int | None, **facts: Any) -> Measured:
    """What is reported of the times of one library, in microseconds, by rank and iteration."""
    slowest = times.max(axis=0)
    by_rank = times.mean(axis=1)
    if average is None:
        reported = float(np.median(slowest))
    else:
        reported = float((by_rank[0], by_rank.mean(), by_rank.min(), by_rank.max())[average])
    return Measured(reported, tuple(slowest.tolist()), tuple(by_rank.tolist()), wrong, **facts)
