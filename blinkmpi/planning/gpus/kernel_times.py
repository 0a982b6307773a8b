"""What a call takes on the GPUs of a node, by each protocol: a closed form of few parameters (docs/certainty.md).

A kernel begins and ends, flags or packets pass from GPU to GPU so many times one after another, and the bytes cross the
busiest link. Pure: the parameters are defaults, or follow from what ``blinkmpi topo --measure`` found on a machine.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from msgspec.structs import replace

from ...program.call import REDUCTIONS, Call, call_of_bytes
from ...program.cost_model import LATENCY, Key, loads
from ...program.ir import Program
from ...program.lower import lower
from ...program.routes import Routes
from ...topology.measured import FAST, Measured, links_between
from ...topology.model import Topology
from ...trees.tree import Packing
from ...util.codec import Value
from ..plan import PACKETS, Plan, ProtocolName, Rule
from ..predictor import Basis
from ..selection import kernel_call

CODEC_BYTES = {"ll16": 2.0, "ll128": 8 / 7}  # that cross a link for each byte of data
EXCHANGES = {
    ("reduce_scatter", "one_shot"): 1.0,
    ("alltoall", "one_shot"): 1.0,
    ("reduce", "two_shot"): 1.0,
    ("allreduce", "two_shot"): 0.5,
}  # the part of a call by lines in which each rank has other data for each peer
LONG_EXCHANGES = {"reduce_scatter": 1.0, "alltoall": 1.0, "allreduce": 0.5}  # likewise, by direct or slots over one hop
MOST_PEERS = 3  # with which that was measured
ROOTED_ONE_SHOT = ("broadcast", "reduce")  # whose root sends to, or hears from, every rank
ONE_WAY = (*ROOTED_ONE_SHOT, "gather", "scatter")  # in which no rank waits for one that waits for it


class KernelCosts(Value, frozen=True):
    """The parameters: of a kernel, of a hop from GPU to GPU, and of bytes.

    ``line_s`` is what a hop of lines of 128 bytes takes longer: their data are loaded when their flags have come. Where
    each rank has other lines for each peer, each peer but one adds ``exchange`` of the time on the wire; where it has
    other long data for each over one hop, ``exchange_long``.
    ``wire`` is the time of a byte on an NVLink in terms of that by the link's rate, ``back`` what a byte the other way
    adds to it. A CTA moves ``cta_bytes_s`` of what lies at peers, a GPU copies ``copy_bytes_s`` in its own memory.
    ``direct_hops`` and ``slots_hops`` are how many hops follow one another in a call besides its bytes. Calls that are
    launched one by one, not in a graph, begin ``gap_s`` apart. ``basis`` says where the numbers are from.
    """

    launch_s: float
    hop_s: float
    line_s: float
    exchange: float
    exchange_long: float
    wire: float
    back: float
    cta_bytes_s: float
    copy_bytes_s: float
    direct_hops: float
    slots_hops: float
    gap_s: float
    flag_us: float
    basis: str


# `python benchmarks/gpu_certainty.py --fit` prints these numbers and says which rows they are from.
H200 = KernelCosts(
    launch_s=2.04e-6, hop_s=0.75e-6, line_s=0.35e-6, exchange=0.21, exchange_long=0.055, wire=1.22, back=0.089,
    cta_bytes_s=22e9, copy_bytes_s=1.97e12, direct_hops=5.6, slots_hops=12.0, gap_s=2.1e-6, flag_us=1.3,
    basis="defaults, of H200 on NVLink",
)  # fmt: skip


def costs_of(topology: Topology, measured: Measured | None) -> KernelCosts:
    """The defaults, with the rate of stores over NVLink and the round trip of a flag as measured on this machine."""
    if measured is None:
        return H200
    shares, flags = [], []
    for row in measured.rows:
        if row.what == "push" and row.mbps:
            links = links_between(topology, row.src, row.dst)
            if links and all(k.kind in FAST for k in links):
                shares.append(min(k.mbps for k in links) / row.mbps)
        elif row.what == "flag" and row.us:
            flags.append(row.us)
    if not shares or not flags:
        return H200
    flag = statistics.median(flags)
    wire = max(1.0, statistics.median(shares))
    basis = f"links and flags as measured here on {measured.date}, the rest defaults of H200"
    return replace(H200, wire=wire, hop_s=H200.hop_s * flag / H200.flag_us, flag_us=flag, basis=basis)


def seconds(
    call: Call, rule: Rule, program: Program, routes: Routes, topology: Topology, costs: KernelCosts = H200, *,
    in_place: bool = False, graph: bool = True,
) -> float:  # fmt: skip
    """Seconds of a call that goes by ``rule``, whose stages are those of ``program``.

    Args:
        program: of a call by ``rs_ag``, that of its reduce-scatter.
        routes: of the program: its packing, mostly.
        graph: whether calls follow one another in a CUDA graph. If not, the host may need longer than all this.

    Raises:
        PlanError: if the program does not fit the routes or the machine.
    """
    alone = rule.protocol in PACKETS or rule.protocol == "direct"
    work = loads(_of_operands(program) if alone else program, routes, topology)
    time = costs.launch_s + (0.0 if graph else costs.gap_s)
    if rule.protocol in PACKETS:
        return time + _by_packets(call, rule.protocol, work, costs)
    kind = "reduce_scatter" if rule.protocol == "rs_ag" else call.collective
    part = LONG_EXCHANGES.get(kind, 0.0) if rule.scheme == "onehop" else 0.0
    wire = _busiest(work, costs) * (1 + costs.exchange_long * part * _more_peers(call))
    if rule.protocol == "direct":
        ctas = rule.ctas * costs.cta_bytes_s
        time += costs.direct_hops * costs.hop_s + max(wire, _at_peers(call) / ctas if ctas else 0.0)
    else:
        kernels = 1
        if rule.protocol == "rs_ag":  # the allgather moves as many bytes, of results
            kernels, wire = 2, wire + _busiest(loads(_of_operands(program), routes, topology), costs)
        time += max(kernels * costs.slots_hops * costs.hop_s, _first_chunk(program, routes, topology)) + wire
    if in_place and call.collective == "reduce_scatter":  # the result moves to the front
        time += call.nbytes / call.n / costs.copy_bytes_s
    return time


@dataclass(frozen=True)
class ByKernels:
    """A :class:`~..predictor.Predictor`: by what kernels cost on the GPUs of a node.

    Args:
        plan_of: the plan that has a collective and root.
        program: makes the program of a call by a row of a plan.
        in_place, graph: what the calls are; see :func:`seconds`.
    """

    plan_of: Callable[[str, int], Plan]
    program: Callable[[Call, Rule, Plan], Program]
    topology: Topology
    costs: KernelCosts = H200
    in_place: bool = False
    graph: bool = True
    basis: ClassVar[Basis] = "kernels"

    def seconds(self, call: Call, rule: Rule) -> float | None:
        """Seconds of a call; None for an algorithm of a user's."""
        plan = self.plan_of(call.collective, call.root)
        if plan.algorithm(call.collective, call.root, rule.scheme) is not None:
            return None
        shown, of_shown = kernel_call(call, rule), rule
        if shown is not call:
            plan, of_shown = self.plan_of(shown.collective, shown.root), replace(rule, protocol="slots")
        program = self.program(shown, of_shown, plan)
        packing = plan.packing(shown.collective, shown.root, rule.scheme)
        costs, in_place, graph = self.costs, self.in_place, self.graph
        return seconds(call, rule, program, packing, self.topology, costs, in_place=in_place, graph=graph)


def _of_operands(program: Program) -> Program:
    """The program with no type on its channels but the operands': packets and ``direct`` send nothing else."""
    return replace(program, channels=tuple(replace(channel, rounded=True) for channel in program.channels))


def _by_packets(call: Call, protocol: str, work: dict[Key, float], costs: KernelCosts) -> float:
    codec, _, shots = protocol.partition("_")
    rooted = call.collective in ROOTED_ONE_SHOT
    turns = 0 if call.collective in ONE_WAY else 1  # for which a rank that sends waits in its turn
    times = 1.0
    if shots == "two_shot":
        turns += 1
    elif call.collective == "allreduce":
        times = call.n / 2  # whole vectors go to all, and not a part there and the result back
    elif rooted:
        times = call.n - 1
    wire = max(work.values(), default=0.0) * costs.wire if rooted and shots == "one_shot" else _busiest(work, costs)
    turn = costs.hop_s
    if codec == "ll128":
        turn += costs.line_s
        times *= 1 + costs.exchange * EXCHANGES.get((call.collective, shots), 0.0) * _more_peers(call)
    return costs.hop_s + turns * turn + times * CODEC_BYTES[codec] * wire


def _more_peers(call: Call) -> int:
    """The peers but one, as far as they were measured."""
    return max(0, min(call.n - 1, MOST_PEERS) - 1)


def _busiest(work: dict[Key, float], costs: KernelCosts) -> float:
    """Seconds of the busiest link, from those that its rate would allow."""
    found = [
        mine * costs.wire + work.get((dst, src, kind), 0.0) * costs.back if kind in FAST else mine
        for (src, dst, kind), mine in work.items()
    ]
    return max(found, default=0.0)


def _at_peers(call: Call) -> float:
    """Bytes that the CTAs of the busiest rank load from peers and store to them."""
    n, nbytes = call.n, call.nbytes
    if call.collective == "allreduce":
        return 2 * nbytes * (n - 1) / n
    if call.collective in ROOTED_ONE_SHOT:
        return nbytes * (1 if call.collective == "broadcast" or n <= 2 else n / (n - 1))
    return nbytes * (n - 1) / n


def _first_chunk(program: Program, routes: Routes, topology: Topology) -> float:
    """Seconds of a first chunk from rank to rank, through the deepest tree."""
    kinds = {k.kind for k in topology.links if k.kind in routes.links} or {k.kind for k in topology.links}
    ways = 2 if program.call.collective == "allreduce" else 1
    return ways * routes.depth * max((LATENCY[kind] for kind in kinds), default=0.0)


# ---------------------------------------------------------------- boundaries of protocols

# Where one protocol takes over from another, for more GPUs than were tried.
KIB = 1 << 10
AT = (256 * KIB, 16384 * KIB)  # bytes of two calls: a protocol's time is a line over size
CHUNK = (32 * KIB, 4)
WORTH = 1.05  # times as long as lines of 128 bytes: until then packets of 16 are taken, which poll once
TWO_SHOTS = ("allreduce", "broadcast", "reduce")


class Boundaries(NamedTuple):
    """Bytes of the whole vector where packets of 16 end, lines in one shot, lines in two; where direct begins."""

    packets: int
    one_shot: int
    two_shot: int
    direct: int


class _Line(NamedTuple):
    fixed: float
    each: float

    def until(self, other: "_Line", worth: float = 1.0) -> float:
        """The bytes from which on this takes ``worth`` times as long as the other."""
        more, less = self.each - worth * other.each, worth * other.fixed - self.fixed
        return max(0.0, less / more) if more > 0 else inf


def boundaries(packing: Packing, topology: Topology) -> Boundaries:
    """For the one-hop packing of a collective on GPUs that NVLink joins, with the defaults of H200."""
    protocols: list[ProtocolName] = ["ll16_one_shot", "ll128_one_shot", "slots", "direct"]
    two = packing.collective in TWO_SHOTS
    by = _lines(packing, topology, [*protocols, "ll128_two_shot"] if two else protocols)
    one_shot, slots, direct = by["ll128_one_shot"], by["slots"], by["direct"]
    lines = by.get("ll128_two_shot", one_shot)
    packets, last = by["ll16_one_shot"].until(one_shot, WORTH), lines.until(slots)
    first = min(one_shot.until(lines), one_shot.until(slots)) if two else last
    return Boundaries(_rounded(packets), _rounded(first), _rounded(last) if two else 0, _rounded(lines.until(direct)))


def _lines(packing: Packing, topology: Topology, protocols: Iterable[ProtocolName]) -> dict[ProtocolName, _Line]:
    """The time of each protocol over size."""
    op = "sum" if packing.collective in REDUCTIONS else ""
    calls = [call_of_bytes(packing.collective, packing.n, size, op=op, root=max(packing.root, 0)) for size in AT]
    programs = [lower(packing, call, chunk_bytes=CHUNK[0], depth=CHUNK[1]) for call in calls]
    found = {}
    for protocol in protocols:
        rule = Rule(packing.collective, 0, packing.scheme, *CHUNK, protocol=protocol)
        less, more = (seconds(c, rule, p, packing, topology, H200) for c, p in zip(calls, programs, strict=True))
        each = (more - less) / (calls[1].nbytes - calls[0].nbytes)
        found[protocol] = _Line(less - each * calls[0].nbytes, each)
    return found


def _rounded(nbytes: float) -> int:
    """To whole units of 16 KiB, and no further than any vector."""
    return round(min(nbytes, 1 << 40) / (16 * KIB)) * 16 * KIB
