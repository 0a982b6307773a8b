"""Run a program on NumPy for all ranks in one process, and price it on the links (Blink section 4).

:func:`run` gives exactly the bits that a real executor gives: the same folds, in
the same order, in the same types. :func:`price` is a discrete-event model of the
same lanes on the machine's links, or on the cores where the ranks share a memory.

Pure: no MPI, no GPU, no clock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from .codec import Value
from .errors import ArgumentError, PlanError
from .numerics import Array, accumulator_of, check_op, dtype_of, fold
from .plan import nbytes_of
from .program import REDUCTIONS, Call, Lane, Program
from .topology.model import Link, LinkKind, Topology
from .trees.tree import Packing

# Seconds that a chunk needs from one rank to the next besides its transfer: write, flag, poll.
# NVLink, PCIe, network: as a ring's step in NCCL's tuning tables (src/graph/tuning.cc, hwLat: 1.9-3.4, 2.5-5.7 and
# 4.0-9.6 us). Memory: a flag between two processes that poll with sched_yield, measured at 1 us with a core each.
LATENCY = {"nvlink": 2e-6, "xgmi": 2e-6, "pcie": 5e-6, "host": 5e-6, "net": 10e-6, "memory": 1e-6}

# How much is simulated before extrapolating: chunk hops in all, chunks of a lane, fills of a channel's slots.
EVENTS, MAX_CHUNKS, FILLS = 24_000, 128, 4


def needed(call: Call, rank: int) -> int:
    """Elements of ``rank``'s send buffer; -1 where it needs none."""
    if call.collective == "barrier" or (call.collective in ("broadcast", "scatter") and rank != call.root):
        return -1
    return call.send_count


def given(call: Call, rank: int) -> int:
    """Elements of ``rank``'s receive buffer; -1 where it gets none."""
    kind, at_root = call.collective, rank == call.root
    if kind == "barrier" or (kind == "broadcast" and at_root) or (kind in ("reduce", "gather") and not at_root):
        return -1
    return call.recv_count(rank)


def run(program: Program, sends: Sequence[Array | None]) -> list[Array | None]:
    """Execute ``program`` for all ranks.

    Args:
        sends: one 1-D array of the call's type for each rank, or None where the rank sends nothing.

    Returns:
        The receive array of each rank, or None where it receives nothing (the root of a broadcast, all but
        the root of a reduce or gather, everybody in a barrier).

    Raises:
        ArgumentError: if a send array is missing or has another type or length than the call.
    """
    call = program.call
    dtype, accumulator = dtype_of(call.dtype), accumulator_of(call.dtype)
    reduces = call.collective in REDUCTIONS
    if reduces:
        check_op(call.op, call.dtype)
    _check_sends(call, sends)
    recvs = [np.zeros(n, dtype) if (n := given(call, rank)) >= 0 else None for rank in range(call.n)]
    slots: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for i in _order(program):
            lane = program.lanes[i]
            operands = [slots[lane.ins[k]] if k >= 0 else _local(sends, lane) for k in lane.fold]
            value = np.empty(lane.count, accumulator if reduces and lane.way != "down" else dtype)
            fold(call.op, operands, value, final=lane.final, n=call.n)
            if lane.way != "up":
                value = value.astype(dtype)
            slots.update(dict.fromkeys(lane.outs, value))
            target = recvs[lane.rank]
            if lane.store is not None and target is not None:
                target[lane.store : lane.store + lane.count] = value
    return recvs


def _check_sends(call: Call, sends: Sequence[Array | None]) -> None:
    if len(sends) != call.n:
        raise ArgumentError(f"{call.collective}: got {len(sends)} send arrays for {call.n} ranks; give one per rank")
    for rank, send in enumerate(sends):
        want = needed(call, rank)
        if want >= 0 and (send is None or send.dtype != dtype_of(call.dtype) or send.shape != (want,)):
            got = "nothing" if send is None else f"{send.dtype} of shape {send.shape}"
            raise ArgumentError(
                f"{call.collective}: rank {rank} sends {got}, wanted {call.dtype} of shape ({want},); give that array"
            )


def _local(sends: Sequence[Array | None], lane: Lane) -> Array:
    send = sends[lane.rank]
    if send is None or lane.local is None:
        raise PlanError(f"rank {lane.rank}: a lane of tree {lane.tree} reads a send buffer that the rank has not; "
                        "check() the program")  # fmt: skip
    return send[lane.local : lane.local + lane.count]


def _order(program: Program) -> list[int]:
    """Lane numbers, every lane after those that it reads from."""
    writer = {c: i for i, lane in enumerate(program.lanes) for c in lane.outs}
    return list(TopologicalSorter({i: [writer[c] for c in k.ins] for i, k in enumerate(program.lanes)}).static_order())


class Price(Value, frozen=True):
    """A prediction: the call's time, its algorithm bandwidth in GB/s, and how long each link works.

    ``busy`` rows are (source vertex, target vertex, link kind, seconds), ascending. Where ranks share a memory, the
    row of a rank's link to the memory is the time that its core works.
    """

    seconds: float
    algbw: float
    busy: tuple[tuple[int, int, str, float], ...]

    @property
    def busiest(self) -> float:
        """Seconds of the busiest link; no schedule with these loads can be faster."""
        return max((row[3] for row in self.busy), default=0.0)


def bus_factor(collective: str, n: int) -> float:
    """What nccl-tests multiplies algorithm bandwidth by to get bus bandwidth."""
    if collective == "allreduce":
        return 2 * (n - 1) / n
    return 1.0 if collective in ("broadcast", "reduce", "barrier") else (n - 1) / n


def price(program: Program, packing: Packing, topology: Topology) -> Price:
    """Predict the time of ``program``, which was lowered from ``packing``, on ``topology``.

    On links: a chunk crosses the path of its tree edge (against it on the way up); each link serves chunks one after
    another at its rate, in order of arrival, and passes a chunk on as it comes in (cut-through), so the slowest link
    decides. A slot is free again when its chunk has been passed on. Folding itself costs nothing.

    Where ranks share a memory, work is on the cores: a step passes its bytes through its rank's core, once for a copy
    and m - 1 times for a fold of m operands, at the rate of the rank's link to the memory, one step at a time; what
    leaves for another node then crosses the links of the network. As in the bounds, what a rank only copies from its
    own send to its own receive buffer is free: in place it need not.

    Vectors of more than :data:`MAX_CHUNKS` chunks in a lane (fewer where there are many lanes) are simulated at two
    smaller sizes and extrapolated along the line through both: the pipeline is in its steady state there. The result is
    never below the work of the busiest link.

    Raises:
        PlanError: if the program does not fit the packing, or a path uses a link that the machine does not have.
    """
    model = _Model(program, packing, topology)
    if not program.lanes:  # a barrier: up and down one tree
        depth = max((tree.depth for tree in packing.trees), default=0)
        hop = max((LATENCY[k.kind] for k in topology.links), default=0.0)
        return Price(2 * depth * hop, 0.0, ())
    longest = max(-(-lane.count // step) for lane, step in zip(program.lanes, model.steps, strict=True))
    limit = max(FILLS * program.depth, min(MAX_CHUNKS, EVENTS // max(1, model.hops)))
    if longest <= limit:
        seconds = model.play(1.0)
    else:
        part = limit / longest
        full, half = model.play(part), model.play(part / 2)
        seconds = full + (full - half) * 2 * (1 - part) / part
    busy = tuple((*key, model.load[key]) for key in sorted(model.load))
    seconds = max([seconds, *(row[3] for row in busy)])
    return Price(seconds, nbytes_of(program.call) / seconds / 1e9 if seconds else 0.0, busy)


class _Transfer(NamedTuple):
    """One step's chunk to one place: the links that it crosses, as (number, seconds an element), and who gets it."""

    links: tuple[tuple[int, float], ...]
    latency: float
    sinks: tuple[int, ...]  # lanes that read it


Key = tuple[int, int, str]


class _Model:
    """The lanes of a program as a network of queues."""

    def __init__(self, program: Program, packing: Packing, topology: Topology) -> None:
        self.program = program
        self.load: dict[Key, float] = defaultdict(float)  # seconds of work on each link for the whole call
        self._links: dict[tuple[int, int], list[Link]] = defaultdict(list)
        for link in topology.links:
            self._links[link.src, link.dst].append(link)
        self._numbers: dict[Key, int] = {}
        self._packing, self._topology = packing, topology
        self.steps = [program.chunk_of(lane) for lane in program.lanes]
        reader = {(c, lane.rank): i for i, lane in enumerate(program.lanes) for c in lane.ins}
        writer = {c: i for i, lane in enumerate(program.lanes) for c in lane.outs}
        self.sources = [tuple(writer[c] for c in lane.ins) for lane in program.lanes]
        self.sinks = [
            tuple(sorted(reader[c, r] for c in lane.outs for r in program.channels[c].readers))
            for lane in program.lanes
        ]
        cores = {r: self._core(r) for r in range(topology.n)} if _on_cores(packing, topology) else {}
        self.transfers = [
            (self._work(i, cores[lane.rank], reader) if lane.ins or lane.outs else ())
            if cores
            else self._crossings(lane, reader)
            for i, lane in enumerate(program.lanes)
        ]
        self.hops = sum(len(t.links) for transfers in self.transfers for t in transfers)

    def _core(self, rank: int) -> Link:
        memory = self._topology.memory_of(self._topology.devices[rank].node)
        found = [k for k in self._links[rank, memory if memory is not None else -1] if k.kind == "memory"]
        if not found:
            raise PlanError(f"{self._topology.name}: rank {rank} has no link to its node's memory; add it")
        return found[0]

    def _on(self, link: Link, nbytes: float, count: int) -> tuple[int, float]:
        """Book ``nbytes`` on ``link``; its number, and its seconds for each of ``count`` elements."""
        key = (link.src, link.dst, link.kind)
        seconds = nbytes / (link.mbps * 1e6)
        self.load[key] += seconds
        return self._numbers.setdefault(key, len(self._numbers)), seconds / count

    def _work(self, i: int, core: Link, reader: dict[tuple[int, int], int]) -> tuple[_Transfer, ...]:
        """What lane ``i`` costs its rank's core, and the network where its chunks go to other nodes."""
        lane, call = self.program.lanes[i], self.program.call
        partial = call.collective in REDUCTIONS and lane.way != "down"
        width = (accumulator_of if partial else dtype_of)(call.dtype).itemsize
        passes = max(1, len(lane.fold) - 1)
        work = self._on(core, passes * width * lane.count, lane.count)
        several = not self._packing.multicast  # who reads what is written once need not be the end of an edge
        away = [x for x in self._crossings(lane, reader, kind="net") if x.links] if several else []
        if len(away) == 1 == len(self.sinks[i]):  # to the network alone, after the core
            return (_Transfer((work, *away[0].links), away[0].latency, away[0].sinks),)
        sinks = tuple(sink for sink in self.sinks[i] if not any(sink in x.sinks for x in away))
        return (_Transfer((work,), LATENCY["memory"], sinks), *away)

    def _crossings(
        self, lane: Lane, reader: dict[tuple[int, int], int], kind: LinkKind | None = None
    ) -> tuple[_Transfer, ...]:
        """The ways of a lane's chunk to each rank that reads it, or what of them is on links of one kind."""
        found = []
        for c in lane.outs:
            channel = self.program.channels[c]
            width = (accumulator_of if channel.partial else dtype_of)(self.program.call.dtype).itemsize
            for rank in channel.readers:
                links = self._path(channel.tree, lane.rank, rank)
                links = [k for k in links if kind in (None, k.kind)]
                booked = tuple(self._on(link, width * lane.count, lane.count) for link in links)
                found.append(_Transfer(booked, max((LATENCY[k.kind] for k in links), default=0.0), (reader[c, rank],)))
        return tuple(found)

    def _path(self, number: int, src: int, dst: int) -> list[Link]:
        """The links from ``src`` to ``dst`` along (or against) an edge of tree ``number``."""
        trees = self._packing.trees
        paths = [e.path if e.src == src else e.path[::-1] for e in (trees[number].edges if number < len(trees) else ())
                 if {e.src, e.dst} == {src, dst}]  # fmt: skip
        if not paths:
            raise PlanError(f"the program sends from rank {src} to {dst} on tree {number}, which has no such edge; "
                            "lower the call from this packing")  # fmt: skip
        hops = []
        for a, b in zip(paths[0], paths[0][1:], strict=False):
            links = self._links[a, b]
            links = [k for k in links if k.kind in self._packing.links] or links
            if not links:
                raise PlanError(f"{self._topology.name} has no link {a}->{b}, which tree {number} uses; plan again")
            hops.append(max(links, key=lambda k: k.mbps))
        return hops

    def play(self, part: float) -> float:
        """Seconds until the last chunk has arrived, for the first ``part`` of every lane's span."""
        depth = self.program.depth
        sizes = [lane.count * part for lane in self.program.lanes]
        chunks = [max(1, -int(-size // step)) for size, step in zip(sizes, self.steps, strict=True)]
        inputs = [dict.fromkeys(sources, 0) for sources in self.sources]  # chunks that came, by lane that sent them
        issued = [0] * len(sizes)
        landed = [[0] * len(transfers) for transfers in self.transfers]  # chunks of each transfer that arrived
        free = [0.0] * len(self._numbers)
        heap: list[tuple[float, int, int, int, int, float, float]] = []
        now, count = 0.0, 0

        def cross(i: int, t: int, hop: int, size: float, tail: float) -> None:
            """Queue a chunk whose head is at link ``hop`` of transfer ``t`` of lane ``i`` now."""
            nonlocal count
            transfer = self.transfers[i][t]
            link, cost = transfer.links[hop]
            start = max(now, free[link])
            free[link] = start + size * cost
            tail = max(tail, free[link])
            last = hop + 1 == len(transfer.links)
            count += 1
            heapq.heappush(heap, (tail + transfer.latency if last else start, count, i, t, hop + 1, size, tail))

        def done(i: int) -> int:
            """Chunks that lane ``i`` is finished with, so that the slots it read are free."""
            return min(landed[i], default=issued[i])

        def advance(i: int) -> None:
            """Start every step of lane ``i`` that has its inputs, and room for its outputs."""
            ready = min([chunks[i], *inputs[i].values(), *[done(j) + depth for j in self.sinks[i]]])
            while issued[i] < ready:
                size = min(self.steps[i], sizes[i] - issued[i] * self.steps[i])
                issued[i] += 1
                for t in range(len(self.transfers[i])):
                    cross(i, t, 0, size, 0.0)

        for i in range(len(sizes)):
            advance(i)
        while heap:
            now, _, i, t, hop, size, tail = heapq.heappop(heap)
            if hop < len(self.transfers[i][t].links):
                cross(i, t, hop, size, tail)
                continue
            landed[i][t] += 1
            for j in self.transfers[i][t].sinks:
                inputs[j][i] += 1
                advance(j)
            for j in (i, *self.sources[i]):
                advance(j)
        return now


def _on_cores(packing: Packing, topology: Topology) -> bool:
    """Whether the packing's bytes go through a memory that ranks share."""
    memories = {topology.n + j for j, s in enumerate(topology.switches) if s.kind == "memory"}
    return packing.multicast or any(v in memories for tree in packing.trees for e in tree.edges for v in e.path)
