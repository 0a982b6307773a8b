"""Measure which scheme, road, chunk and number of CTAs is fastest here, and keep the table (``blinkmpi tune``).

Every candidate runs in a CUDA graph, so that the host's share does not count;
a time is the median of repeats, each the maximum over ranks, and the candidates
of a size take turns. The table lies in the cache folder under the machine's
fingerprint and the GPUs' name; rank 0 reads it when a Communicator is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from .comm import Communicator
from .errors import DeviceError
from .gpu import MEASURED, PACKETS, GpuRoad
from .numerics import dtype_of
from .plan import Rule
from .program import BLOCKED, REDUCTIONS, Call
from .select import GPU_SLOTS
from .transport.cuda.device import cupy
from .transport.cuda.transport import by_packets, fits_packets
from .trees.tree import ROOTED, Collective

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(1 << k for k in range(10, 31, 2))
REPEATS = 5
BATCH_S = 0.004  # of one repeat
CTAS = (16, 32, 64, 128)
CHUNKS = (32 * KIB, 128 * KIB, 512 * KIB)


def tune(
    comm: Communicator,
    collectives: Sequence[Collective],
    *,
    sizes: Sequence[int] = SIZES,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Rule, ...]:
    """Measure, and return the rows of the selection table; collective.

    Args:
        sizes: bytes of the whole vector, ascending.
        say: gets a line per size.

    Raises:
        DeviceError: on every rank, if the job has no GPUs.
    """
    road = comm.gpu_road()
    found: list[Rule] = []
    trial = _Trial(comm, road, max(sizes))
    for collective in collectives:
        for registered in (False, True):
            winners = []
            for nbytes in sizes:
                call = _call(collective, road, nbytes, dtype)
                times = trial.times(call, list(candidates(road, call, registered=registered)), registered=registered)
                best = min(times, key=lambda rule: times[rule])
                winners.append((nbytes, best))
                say(_line(collective, nbytes, registered, times))
            found += rows(winners, registered=registered)
    trial.close()
    return tuple(found)


def candidates(road: GpuRoad, call: Call, *, registered: bool) -> Iterator[Rule]:
    """What could carry a call: every road of the one-hop scheme, and every scheme through slots."""
    nbytes = call.total * dtype_of(call.dtype).itemsize
    schemes = road.plans.schemes(call.collective, call.root)
    base = Rule(call.collective, 0, schemes[0], *GPU_SLOTS, registered=registered)
    if schemes[0] == "onehop" and not road.emulated:
        for packets in PACKETS:
            if by_packets(call) and fits_packets(call, two_shot=packets == "twoshot"):
                yield replace(base, road=packets)
        if registered:
            for ctas in CTAS:
                if ctas * 4 * KIB <= nbytes or ctas == CTAS[0]:
                    yield replace(base, road="direct", ctas=ctas)
    for scheme in schemes:
        for chunk in CHUNKS:
            if chunk == CHUNKS[0] or chunk * 64 <= nbytes:
                yield replace(base, scheme=scheme, chunk_bytes=chunk)
                if chunk * 256 <= nbytes:
                    yield replace(base, scheme=scheme, chunk_bytes=chunk, ctas=64)


def rows(winners: Sequence[tuple[int, Rule]], *, registered: bool) -> list[Rule]:
    """The table's rows from the fastest rule at each size: a rule begins half-way (in octaves) from the size before."""
    made: list[Rule] = []
    before = 0
    for nbytes, rule in winners:
        at = 0 if not made else int((before * nbytes) ** 0.5)
        kept = replace(rule, min_bytes=at, registered=registered, reason=MEASURED)
        if not made or replace(made[-1], min_bytes=at) != kept:
            made.append(kept)
        before = nbytes
    return made


class _Trial:
    """Buffers, a stream, and a way to time rules against one another."""

    def __init__(self, comm: Communicator, road: GpuRoad, nbytes: int) -> None:
        self.cp, self.comm, self.road = cupy(), comm, road
        self.stream = self.cp.cuda.Stream(non_blocking=True)
        self.buffers = {
            True: [comm.empty(nbytes, "uint8") for _ in range(2)],
            False: [self.cp.empty(nbytes, "uint8") for _ in range(2)],
        }
        for pair in self.buffers.values():
            for buffer in pair:
                buffer[...] = 0

    def close(self) -> None:
        """Give the buffers back; collective."""
        self.stream.synchronize()
        for buffer in self.buffers[True]:
            self.comm.deregister(buffer)

    def times(self, call: Call, rules: Sequence[Rule], *, registered: bool) -> dict[Rule, float]:
        """Seconds per call for each rule that the GPU has room for."""
        send, recv = self.buffers[registered]
        graphs: dict[Rule, tuple[Any, int]] = {}
        rank, item = self.comm.rank, dtype_of(call.dtype).itemsize
        for rule in rules:
            try:
                enqueue = self.road.trial(
                    call, rule, send[: call.send_count * item], recv[: call.recv_count(rank) * item], self.stream.ptr
                )
            except DeviceError:  # no room for so many or so large slots: the same on all ranks
                continue
            enqueue()
            self.stream.synchronize()
            count = self._count(enqueue)
            self.stream.begin_capture()
            for _ in range(count):
                enqueue()
            graphs[rule] = (self.stream.end_capture(), count)
        samples: dict[Rule, list[float]] = {rule: [] for rule in graphs}
        for _ in range(REPEATS):
            for rule, (graph, count) in graphs.items():
                samples[rule].append(self._once(lambda graph=graph: graph.launch(self.stream)) / count)  # type: ignore[misc]
        return {rule: statistics.median(of) for rule, of in samples.items()}

    def _once(self, work: Callable[[], None]) -> float:
        self.comm.Barrier()
        begin, end = self.cp.cuda.Event(), self.cp.cuda.Event()
        begin.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return float(max(self.comm.allgather(self.cp.cuda.get_elapsed_time(begin, end)))) * 1e-3

    def _count(self, enqueue: Callable[[], None]) -> int:
        return max(2, min(50, int(BATCH_S / max(self._once(enqueue), 1e-6))))


def _call(collective: Collective, road: GpuRoad, nbytes: int, dtype: str) -> Call:
    n = road.machine.n
    count = nbytes // dtype_of(dtype).itemsize
    block = max(1, count // n) if collective in BLOCKED else count
    counts = (block,) * (n if collective == "reduce_scatter" else 1)
    op, root = "sum" if collective in REDUCTIONS else "", 0 if collective in ROOTED else -1
    return Call(collective, n, counts, dtype, op, root)


def _line(collective: str, nbytes: int, registered: bool, times: dict[Rule, float]) -> str:
    def name(rule: Rule) -> str:
        how = (
            f"{rule.chunk_bytes >> 10}K" if rule.road == "slots" else rule.road + (f"@{rule.ctas}" if rule.ctas else "")
        )
        return f"{rule.scheme}/{how}"

    order = sorted(times, key=lambda rule: times[rule])
    shown = ", ".join(f"{name(rule)} {times[rule] * 1e6:.1f}" for rule in order)
    return f"{collective} {nbytes} {'registered' if registered else 'any'}: {shown} us"
