"""Time one row on host memory: the contenders in turn, then a check of each one's results.

Each iteration is timed alone, between MPI's own barriers on the job's communicator. With a peer the libraries alternate
iteration by iteration, never at once, and an untimed call of the same library goes before each timed one. So a library
finds caches and buffers as a program that uses it alone would. The MPI module comes in as an argument.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..program.reduction import Array
from ..util.together import allgather
from .timing import Contender, Timing, TimingResult, check, no_collection, ready, summary, times_of_all_ranks

ROW_SECONDS = 3.0
FEWEST = 5


def measure(world: Any, mpi: Any, contenders: Sequence[Contender], timing: Timing) -> list[TimingResult]:
    """Time the libraries in turn, then check each; collective over ``world``."""
    for contender in contenders:
        ready(contender.layout)
    with np.errstate(all="ignore"):
        times = _time(world, mpi, [contender.run for contender in contenders], timing)
        wrong = [check(world, contender.layout, contender.run, timing.checks) for contender in contenders]
    everyone = times_of_all_ranks(world, times) * (1e6 / timing.aggregate)
    return [summary(everyone[:, i], wrong[i], timing.average) for i in range(len(contenders))]


def _time(world: Any, mpi: Any, runs: Sequence[Callable[[], Any]], timing: Timing) -> Array:
    """Seconds of this rank, by library and iteration."""
    for run in runs:
        for _ in range(timing.warmup):
            run()
    iterations = timing.wanted
    if timing.iterations is None:
        for run in runs:  # an unreported call of each library says how many iterations fit
            seconds = max(allgather(world, _once(world, run, timing.aggregate, time.perf_counter), float))
            fit = int(ROW_SECONDS / max(seconds, 1e-9))
            iterations = min(iterations, max(FEWEST, fit))
    clock = time.process_time if timing.cpu_time else time.perf_counter
    times = np.empty((len(runs), iterations))
    with no_collection():
        for i in range(iterations):
            for k, run in enumerate(runs):
                if len(runs) > 1:
                    run()
                times[k, i] = _once(world, run, timing.aggregate, clock)
    return times


def _once(world: Any, run: Callable[[], Any], aggregate: int, clock: Callable[[], float]) -> float:
    """Between two barriers: on crowded cores, what a rank does next would delay the end of another's call."""
    world.Barrier()
    start = clock()
    for _ in range(aggregate):
        run()
    seconds = clock() - start
    world.Barrier()
    return seconds
