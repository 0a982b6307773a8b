"""Time one row on GPU memory: calls on one stream between two events, the contenders in turn.

A repeat is a block of calls back to back, after one of MPI's barriers and one untimed call of the same library; its
time per call is that of the slowest rank. Libraries alternate repeat by repeat, never at once. With ``-G`` the block
is a CUDA graph that holds the calls and is launched several times. The time that the host takes to start a
call is measured too. CuPy is the argument ``xp``.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ..program.call import Call
from ..program.reduction import Array
from ..util.together import allgather
from .layout import Buffers, Layout
from .timing import Contender, Timing, TimingResult, check, no_collection, our_call, ready, summary, times_of_all_ranks

REPEATS = 9
BLOCK_SECONDS = 0.03
FEWEST_CALLS = 5  # in a block, whatever they take
MOST_CALLS = 200
GRAPH_CALLS = 50  # the most that one graph holds: nodes cost time and memory to instantiate
TRIAL_CALLS = 5


def calls_in_block(seconds: float, timing: Timing) -> int:
    """How many calls a block (one graph, with ``-G``) holds, if one takes ``seconds`` of the slowest library.

    ``-n`` says it exactly; otherwise as many as fit into BLOCK_SECONDS, within limits.
    """
    if timing.iterations is not None:
        return timing.iterations * timing.aggregate
    launches = max(1, timing.replays)
    fit = int(BLOCK_SECONDS / max(seconds, 1e-9) / launches)
    return max(math.ceil(FEWEST_CALLS / launches), min(GRAPH_CALLS if timing.replays else MOST_CALLS, fit))


class GpuTimer:
    """Times calls on this rank's GPU: its stream, and the buffers of a run.

    Args:
        comm: our communicator, which has chosen the GPU; its ``empty`` gives symmetric memory.
        symmetric: whether the buffers are such memory (``-R 2``), or plain (``-R 0``).
    """

    def __init__(self, xp: Any, comm: Any, calls: Sequence[Call], *, unalign: int, symmetric: bool) -> None:
        self.xp, self.comm = xp, comm
        self.stream = xp.cuda.Stream(non_blocking=True)
        with self.stream:
            allocate = partial(comm.empty if symmetric else xp.empty, dtype=np.uint8)
            self.buffers = Buffers(calls, unalign=unalign, xp=xp, allocate=allocate)
            self.stream.synchronize()

    def contender(self, layout: Layout, *, persistent: bool) -> Contender:
        """Our call: with ``persistent`` MPI's persistent request, started anew each time."""
        if not persistent:
            run = our_call(self.comm, layout)
            return Contender(layout, lambda stream: run(stream=stream))
        start = our_call(self.comm, layout, suffix="_init")(stream=self.stream).Start
        return Contender(layout, lambda _: start())

    def measure(self, world: Any, mpi: Any, contenders: Sequence[Contender], timing: Timing) -> list[TimingResult]:
        """Time the libraries in turn, then check each; collective over ``world``."""
        with self.stream:
            for contender in contenders:
                ready(contender.layout)
            calls = calls_in_block(max(self._trial(world, mpi, contender, timing) for contender in contenders), timing)
            blocks = [self._block(contender.run, calls, timing) for contender in contenders]
            device, host = self._time(world, blocks)
            wrong = [check(world, one.layout, self._checked(one, timing), timing.checks) for one in contenders]
        each = calls * max(1, timing.replays)
        on_device, on_host = (times_of_all_ranks(world, times) * (1e6 / each) for times in (device, host))
        reported = on_host if timing.cpu_time else on_device
        pays = [median(on_host[:, i].max(axis=0).tolist()) for i in range(len(contenders))]
        return [
            summary(reported[:, i], wrong[i], timing.average, calls=each, host_us=pays[i], note=contender.note)
            for i, contender in enumerate(contenders)
        ]

    def _trial(self, world: Any, mpi: Any, contender: Contender, timing: Timing) -> float:
        """Warm up; seconds of one call of the slowest rank."""
        for _ in range(max(1, timing.warmup)):
            contender.run(self.stream)
        start = self.stream.record()
        for _ in range(TRIAL_CALLS):
            contender.run(self.stream)
        return float(max(allgather(world, self._elapsed(start), float))) / TRIAL_CALLS

    def _elapsed(self, start: Any) -> float:
        """Seconds from ``start`` until all that is on the stream is done."""
        end = self.stream.record()
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(start, end)) / 1e3

    def _block(self, run: Callable[[Any], Any], calls: int, timing: Timing) -> tuple[Callable[[], None], ...]:
        """(what a repeat runs once untimed, what it times)."""
        stream = self.stream

        def one() -> None:
            run(stream)

        def many() -> None:
            for _ in range(calls):
                run(stream)
                if timing.blocking:
                    stream.synchronize()

        if not timing.replays:
            return one, many
        graph = self._captured(many)

        def launch() -> None:
            for _ in range(timing.replays):
                graph.launch(stream)

        graph.launch(stream)  # the first launch uploads it
        stream.synchronize()
        return one, launch

    def _captured(self, work: Callable[[], None]) -> Any:
        """A CUDA graph of what ``work`` puts on the stream."""
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
        return graph

    def _time(self, world: Any, blocks: Sequence[tuple[Callable[[], None], ...]]) -> tuple[Array, Array]:
        """Seconds of this rank by library and repeat: on the device, and of the host until all was started."""
        device, host = np.empty((2, len(blocks), REPEATS))
        with no_collection():
            for i in range(REPEATS):
                for k, (one, timed) in enumerate(blocks):
                    self.stream.synchronize()
                    world.Barrier()
                    one()
                    start = self.stream.record()
                    began = time.perf_counter()
                    timed()
                    host[k, i] = time.perf_counter() - began
                    device[k, i] = self._elapsed(start)
        return device, host

    def _checked(self, contender: Contender, timing: Timing) -> Callable[[], None]:
        """One call, in a graph if the timed ones are, until its result is there."""
        stream = self.stream
        if timing.replays:
            graph = self._captured(lambda: contender.run(stream))

        def run() -> None:
            if timing.replays:
                graph.launch(stream)
            else:
                contender.run(stream)
            stream.synchronize()

        return run


def no_room(xp: Any, need: int) -> str:
    """Why ``need`` bytes do not fit into the free memory of this rank's GPU; empty if they do."""
    free, _ = xp.cuda.runtime.memGetInfo()
    if need <= 0.9 * free:
        return ""
    return f"{need >> 20} MiB of buffers do not fit into the GPU's free {free >> 20} MiB; use a smaller --maxbytes"
