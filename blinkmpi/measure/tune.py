"""Measure which scheme, protocol, chunk and number of CTAs is fastest here, and keep the table (``blinkmpi tune``).

Every candidate runs in a CUDA graph, so that the host's part does not count. A time is the median of repeats, each the
maximum over ranks. The candidates of a size take turns, and those close to the fastest are measured again, longer.
Where neighbouring sizes have different winners, sizes between them are measured too, down to a factor of two, so that
no row rests on a size far from it. Reductions are measured in float32 and in bfloat16, whose partial results travel in
float32: what sends few of them is the fastest there. The table lies in the cache folder under the GPUs' name and a
digest of their links; rank 0 reads it when a Communicator is made.
"""

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..communicator import Communicator
from ..errors import DeviceError
from ..planning.gpus.rules import LL128, by_nvlink
from ..planning.plan import Plan, Rule
from ..planning.slots import GPU_SLOTS
from ..program.call import REDUCTIONS, Call
from ..runtime.cuda.context import MEASURED, CudaContext
from ..runtime.inspection import call_of
from ..transport.cuda.device import cupy
from ..transport.cuda.packets import PROTOCOLS as PACKETS
from ..transport.cuda.packets import fits
from ..trees.tree import MAY_BE_CARRIED, Collective, Tree
from ..util.together import allgather

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(1 << k for k in range(10, 31, 2))
REPEATS, MORE_REPEATS = 5, 12
CLOSE = 1.15  # times of the fastest: measured again
NEAR = 1.5  # likewise: measured at the sizes next to it
MARGIN = 0.02  # by which a rule must be faster to take the place of the one that serves the size before
HYBRID_MARGIN = 0.06  # or to load the host's path beside NVLink, where others' traffic may slow it
FINEST = 2  # the factor between sizes with different winners
BATCH_S = 0.004  # of one repeat
CTAS = (16, 32, 64, 128)
CHUNKS = (32 * KIB, 128 * KIB, 512 * KIB)
RS_AG_TRIED_FROM = 8 * MIB  # two kernels cost a few us more than one
DTYPE, WIDENED_DTYPE = "float32", "bfloat16"  # the second: of calls whose partial results travel widened


def tune(
    comm: Communicator, collectives: Sequence[Collective], *, sizes: Sequence[int] = SIZES,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Rule, ...]:  # fmt: skip
    """Measure, and return the rows of the selection table; collective.

    Args:
        sizes: bytes of the whole vector, ascending.
        say: gets a line per size.

    Raises:
        DeviceError: on every rank, if the job has no GPUs.
    """
    gpus = comm.context.cuda()
    found: list[Rule] = []
    trial = _Trial(comm, gpus, max(sizes), say)
    for collective in collectives:
        comm.plan(collective)
        wide = collective in REDUCTIONS and gpus.machine.n > 2 and gpus.plans.wire == "accumulator"
        for registered in (False, True):
            plain = rows(choices(sizes, partial(trial.measured, collective, registered)), registered=registered)
            found += plain
            if wide:
                measure = partial(trial.measured, collective, registered, widened=True)
                own = rows(choices(sizes, measure), registered=registered, widened=True)
                found += own if own != [replace(row, widened=True) for row in plain] else []
    trial.close()
    return tuple(found)


def candidates(gpus: CudaContext, call: Call, *, registered: bool) -> Iterator[Rule]:
    """What could carry a call: every protocol of the one-hop scheme, and every scheme and algorithm through slots."""
    nbytes = call.nbytes
    schemes = _unlike(gpus.plans, call.collective, call.root)
    base = Rule(call.collective, 0, schemes[0], *GPU_SLOTS, registered=registered)
    if schemes[0] == "onehop" and not gpus.emulated:
        nvlink = by_nvlink(gpus.plans, gpus.machine, call.collective)
        for packets in PACKETS:
            if fits(call, packets) and (nvlink or packets not in LL128):
                yield replace(base, protocol=packets)
        if registered and call.collective not in MAY_BE_CARRIED:
            for ctas in CTAS:
                if ctas * 4 * KIB <= nbytes or ctas == CTAS[0]:
                    yield replace(base, protocol="direct", ctas=ctas)
    long = registered and nbytes >= RS_AG_TRIED_FROM and schemes[0] == "onehop" and not gpus.emulated
    for scheme in _unlike(gpus.plans, "reduce_scatter", -1) if long and call.collective == "allreduce" else ():
        if scheme in schemes and scheme != "hybrid":
            yield from (replace(base, scheme=scheme, protocol="rs_ag", chunk_bytes=chunk) for chunk in CHUNKS)
    for scheme in (*schemes, *gpus.plans.written(call.collective, call.root)):
        for chunk in CHUNKS:
            if chunk == CHUNKS[0] or chunk * 64 <= nbytes:
                yield replace(base, scheme=scheme, chunk_bytes=chunk)
                if chunk * 256 <= nbytes:
                    yield replace(base, scheme=scheme, chunk_bytes=chunk, ctas=64)


def _unlike(plan: Plan, collective: str, root: int) -> list[str]:
    """The schemes for a collective, without those whose trees are an earlier one's."""
    found: dict[tuple[Tree, ...], str] = {}
    for scheme in plan.schemes(collective, root):
        found.setdefault(plan.packing(collective, root, scheme).trees, scheme)
    return list(found.values())


def winner(times: Mapping[Rule, float], before: Rule | None = None) -> Rule:
    """The fastest rule; the one that serves the size before, and any but a hybrid, unless it is slower by a margin."""
    plain = {rule: t for rule, t in times.items() if rule.scheme != "hybrid"} or dict(times)
    best = min(plain, key=lambda rule: plain[rule])
    if before in plain and plain[before] <= plain[best] * (1 + MARGIN):
        best = before
    fastest = min(times, key=lambda rule: times[rule])
    return fastest if times[fastest] * (1 + HYBRID_MARGIN) < times[best] else best


def choices(sizes: Sequence[int], measure: Callable[..., dict[Rule, float]]) -> list[tuple[int, Rule]]:
    """(bytes, winner), ascending: for each of the sizes, and for those between two that have different winners.

    Args:
        measure: times of the rules, or only of those ``among`` them, for so many bytes.
    """
    measured = {nbytes: measure(nbytes) for nbytes in sizes}
    made: list[tuple[int, Rule]] = []

    def add(nbytes: int) -> None:
        best = winner(measured[nbytes], made[-1][1] if made else None)
        if made and best != made[-1][1] and nbytes > FINEST * made[-1][0]:
            first = made[-1][0]
            octaves = (nbytes // first).bit_length() - 1
            between = first << max(1, octaves // 2)
            if between < nbytes:
                near = {r for of in (measured[first], measured[nbytes]) for r in of if of[r] <= NEAR * min(of.values())}
                measured[between] = measure(between, near) or measured[first]
                add(between)
                add(nbytes)
                return
        made.append((nbytes, best))

    for nbytes in sizes:
        add(nbytes)
    return made


def rows(winners: Sequence[tuple[int, Rule]], *, registered: bool, widened: bool = False) -> list[Rule]:
    """The table's rows from the fastest rule at each size: a rule begins half-way (in octaves) from the size before."""
    made: list[Rule] = []
    before = 0
    for nbytes, rule in winners:
        at = 0 if not made else int((before * nbytes) ** 0.5)
        kept = replace(rule, min_bytes=at, registered=registered, widened=widened, reason=MEASURED)
        if not made or replace(made[-1], min_bytes=at) != kept:
            made.append(kept)
        before = nbytes
    return made


class _Trial:
    """Buffers, a stream, and a way to time rules against one another."""

    def __init__(self, comm: Communicator, gpus: CudaContext, nbytes: int, say: Callable[[str], None]) -> None:
        self.cp, self.comm, self.gpus, self.say = cupy(), comm, gpus, say
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

    def measured(
        self, collective: Collective, registered: bool, nbytes: int, among: Collection[Rule] = (), *,
        widened: bool = False,
    ) -> dict[Rule, float]:  # fmt: skip
        """Times of the candidates, or only of those ``among`` them, for so many bytes."""
        dtype = WIDENED_DTYPE if widened else DTYPE
        call = call_of(self.gpus.machine.n, collective, nbytes, dtype, "sum", 0)
        rules = [r for r in candidates(self.gpus, call, registered=registered) if not among or r in among]
        times = self.times(call, rules, registered=registered)
        self.say(_line(f"{collective} {dtype}" if collective in REDUCTIONS else collective, nbytes, registered, times))
        return times

    def times(self, call: Call, rules: Sequence[Rule], *, registered: bool) -> dict[Rule, float]:
        """Seconds per call for each rule that the GPU has room for."""
        send, recv = self.buffers[registered]
        graphs: dict[Rule, tuple[Any, int]] = {}
        send, recv = send[: call.send_count * call.itemsize], recv[: call.recv_count(self.comm.rank) * call.itemsize]
        for rule in rules:
            try:
                enqueue = self.gpus.trial(call, rule, send, recv, self.stream.ptr)
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

        def repeat(times: int, rules: Collection[Rule]) -> dict[Rule, float]:
            for _ in range(times):
                for rule in rules:
                    graph, count = graphs[rule]
                    samples[rule].append(self._once(lambda graph=graph: graph.launch(self.stream)) / count)  # type: ignore[misc]
            return {rule: statistics.median(of) for rule, of in samples.items()}

        found = repeat(REPEATS, graphs)
        close = [rule for rule in graphs if found[rule] <= CLOSE * min(found.values())]
        return repeat(MORE_REPEATS, close) if len(close) > 1 else found

    def _once(self, work: Callable[[], None]) -> float:
        self.comm.Barrier()
        begin, end = self.cp.cuda.Event(), self.cp.cuda.Event()
        begin.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return float(max(allgather(self.comm, self.cp.cuda.get_elapsed_time(begin, end), float))) * 1e-3

    def _count(self, enqueue: Callable[[], None]) -> int:
        return max(2, min(50, int(BATCH_S / max(self._once(enqueue), 1e-6))))


def _line(what: str, nbytes: int, registered: bool, times: dict[Rule, float]) -> str:
    def name(rule: Rule) -> str:
        direct = rule.protocol + (f"@{rule.ctas}" if rule.ctas else "")
        return f"{rule.scheme}/{f'{rule.chunk_bytes >> 10}K' if rule.protocol == 'slots' else direct}"

    order = sorted(times, key=lambda rule: times[rule])
    shown = ", ".join(f"{name(rule)} {times[rule] * 1e6:.1f}" for rule in order)
    return f"{what} {nbytes} {'registered' if registered else 'any'}: {shown} us"
