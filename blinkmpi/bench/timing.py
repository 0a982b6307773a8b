"""Shared by timing on the host and on GPUs: contenders, timing options, and results."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ..program.call import Call
from ..program.reduction import Array
from ..util.together import allgather
from .layout import Layout
from .verification import Wrong, WrongElement

DEFAULT_ITERATIONS = 20
METHODS: dict[str, str] = {
    "allreduce": "Allreduce", "allgather": "Allgather", "reduce_scatter": "Reduce_scatter_block", "broadcast": "Bcast",
    "reduce": "Reduce", "gather": "Gather", "scatter": "Scatter", "alltoall": "Alltoall", "scan": "Scan",
    "exscan": "Exscan",
}  # fmt: skip


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
class TimingResult:
    """One library on one row. Times in microseconds; ``wrong`` is None when not checked."""

    time_us: float
    slowest_us: tuple[float, ...]  # per iteration (GPUs: per repeat), of the slowest rank
    by_rank_us: tuple[float, ...]  # mean over iterations
    wrong: int | None
    wrong_elements: tuple[WrongElement, ...] = ()  # the first ones of each rank
    calls: int = 1  # per element of slowest_us, which is the time of one
    host_us: float | None = None  # GPUs: time that the host takes to start a call
    note: str | None = None  # what the library chose, if it says so

    @property
    def iterations(self) -> int:
        """Timed calls."""
        return len(self.slowest_us) * self.calls

    @property
    def spread(self) -> list[float]:
        """Minimum, median and maximum over the iterations of the slowest rank's time."""
        return [min(self.slowest_us), median(self.slowest_us), max(self.slowest_us)]


@dataclass(frozen=True, slots=True)
class Contender:
    """One library on one row: its buffers and its call, which takes the stream on GPUs and nothing on the host."""

    layout: Layout
    run: Callable[..., Any]
    note: str | None = None


def call_facts(call: Call) -> dict[str, Any]:
    """Keywords that identify a call beside collective and size; operation and root only where it has them."""
    facts: dict[str, Any] = {"dtype": call.dtype, **({"op": call.op} if call.op else {})}
    return facts | ({"root": call.root} if call.root >= 0 else {})


def our_call(comm: Any, layout: Layout, *, suffix: str = "") -> Callable[..., Any]:
    """The call on our communicator (with a suffix, another of its kind), operations by name; it takes more keywords."""
    call = layout.call
    method = getattr(comm, METHODS[call.collective] + suffix)
    keywords = {name: value for name, value in call_facts(call).items() if name != "dtype"}
    return partial(method, *layout.arguments, **keywords)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would run in the middle of some call."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def ready(layout: Layout) -> None:
    """Buffers for calls that are only timed."""
    layout.prepare()
    if layout.in_place:
        layout.calm()


def times_of_all_ranks(world: Any, times: Array) -> Array:
    """The times of all ranks, by rank."""
    everyone = np.empty((world.Get_size(), *times.shape))
    world.Allgather(np.ascontiguousarray(times), everyone)
    return everyone


def check(world: Any, layout: Layout, run: Callable[[], Any], checks: int) -> Wrong | None:
    """What is wrong on all ranks after ``checks`` calls on poisoned buffers; None for no check."""
    if not checks:
        return None
    own = Wrong(0, ())
    for _ in range(checks):
        layout.prepare()
        run()
        wrong = layout.wrong()
        own = Wrong(own.count + wrong.count, own.first or wrong.first)
    everyone = allgather(world, own, Wrong)
    return Wrong(sum(wrong.count for wrong in everyone), tuple(one for wrong in everyone for one in wrong.first))


def summary(times: Array, wrong: Wrong | None, average: int | None, **facts: Any) -> TimingResult:
    """What is reported of the times of one library, in microseconds, by rank and iteration."""
    slowest = times.max(axis=0)
    by_rank = times.mean(axis=1)
    if average is None:
        reported = float(np.median(slowest))
    else:
        reported = float((by_rank[0], by_rank.mean(), by_rank.min(), by_rank.max())[average])
    count, first = (None, ()) if wrong is None else (wrong.count, wrong.first)
    return TimingResult(reported, tuple(slowest.tolist()), tuple(by_rank.tolist()), count, first, **facts)
