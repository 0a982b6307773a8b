"""How long a program takes on a machine: a discrete-event model of its stages on the links, or on the cores of ranks
that share a memory (Blink section 4). Pure: no MPI, no GPU, no clock.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from ..errors import PlanError
from ..topology.model import Link, LinkKind, Topology
from ..util.codec import Value
from .ir import Program, Stage
from .reduction import accumulator_of, dtype_of
from .routes import Routes

# Seconds that a chunk needs from one rank to the next besides its transfer: write, flag, poll.
# NVLink: measured on two H200 (benchmarks/results/message-cost-gpu-np2.json). xGMI, PCIe, network: as a ring's step in
# NCCL's tuning tables (src/graph/tuning.cc, hwLat: 1.9-3.4, 2.5-5.7 and 4.0-9.6 us). Memory: a flag between two
# processes that poll with sched_yield, measured at 1 us with a core each.
LATENCY = {"nvlink": 2.6e-6, "xgmi": 2e-6, "c2c": 2.6e-6, "pcie": 5e-6, "host": 5e-6, "net": 10e-6, "memory": 1e-6}

# Seconds that a message keeps its sender busy besides its bytes, so that the next one waits: on a GPU the threads of a
# step, for their fence and flag; else the rank. Measured for NVLink, memory and MPI (message-cost-*.json of
# benchmarks/results); expected to be the same for xGMI, PCIe and the host's path as for NVLink.
# The CTAs of a GPU's kernel, about as many, share its stages, and those of one stage take turns at its chunks. Each has
# a ring of slots of its own. Of them all no more count than SPARE times as many as keep a link busy: in a simulation
# more would let the chunks of a tree queue up before those of others, which CTAs that move one at a time do not.
MESSAGE = {"nvlink": 1e-6, "xgmi": 1e-6, "c2c": 1e-6, "pcie": 1e-6, "host": 1e-6, "net": 4e-6, "memory": 0.1e-6}
CTAS, SPARE = 64, 1.5

# How much is simulated before extrapolating: chunk hops in all, chunks of a stage, fills of a channel's slots. It is
# doubled, a few times at most, until the last two slopes of time over size differ by less than a part.
EVENTS, MAX_CHUNKS, FILLS = 24_000, 128, 4
DOUBLINGS, STEADY = 4, 0.01


Key = tuple[int, int, str]  # a link: source vertex, target vertex, kind


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


def price(program: Program, routes: Routes, topology: Topology) -> Price:
    """Predict the time of ``program`` on ``topology``, with the routes of the packing from which it was lowered, or
    those of an algorithm's.

    On links: a chunk crosses the path of its tree edge (against it on the way up); each link serves chunks one after
    another at its rate, in order of arrival, and passes a chunk on as it comes in (cut-through), so the slowest link
    decides. A slot is free again when its chunk has been passed on; within a node of GPUs each CTA of a stage has slots
    of its own. Folding itself costs nothing. A message keeps its sender busy (:data:`MESSAGE`): one CTA of its stage,
    or, towards another node, the rank's thread that calls MPI.

    A switch that folds and copies (``trees/in_switch``) does both as fast as its links are, and sends for nothing; the
    latency of a message counts once from rank to rank, where it leaves the switch.

    Where ranks share a memory, work is on the cores: a step passes its bytes through its rank's core, once for a copy
    and m - 1 times for a fold of m operands, at the rate of the rank's link to the memory, one step at a time; what
    leaves for another node then crosses the links of the network. As in the bounds, what a rank only copies from its
    own send to its own receive buffer is free: in place it need not.

    Vectors of more than :data:`MAX_CHUNKS` chunks in a stage (fewer where there are many stages) are simulated at
    smaller sizes, until the pipeline is in its steady state, and extrapolated along the last line. The result is never
    below the work of the busiest link.

    Raises:
        PlanError: if the program does not fit the routes, or a path uses a link that the machine does not have.
    """
    model = _Model(program, routes, topology)
    if not program.stages:  # a barrier: up and down one tree
        depth = routes.depth
        hop = max((LATENCY[k.kind] for k in topology.links), default=0.0)
        return Price(2 * depth * hop, 0.0, ())
    longest = max(-(-stage.count // step) for stage, step in zip(program.stages, model.steps, strict=True))
    limit = max(FILLS * model.slots, min(MAX_CHUNKS, EVENTS // max(1, model.hops)))
    seconds = model.play(1.0) if longest <= limit else _extrapolated(model, limit / longest)
    busy = tuple((*key, model.load[key]) for key in sorted(model.load))
    seconds = max([seconds, *(row[3] for row in busy)])
    return Price(seconds, program.call.nbytes / seconds / 1e9 if seconds else 0.0, busy)


def loads(program: Program, routes: Routes, topology: Topology) -> dict[Key, float]:
    """Seconds that each link works in a call, at its rate; nothing is simulated. Raises as :func:`price`."""
    return dict(_Model(program, routes, topology).load)


class Crossing(NamedTuple):
    """A chunk on a link, in a simulation: the link (source vertex, target vertex, kind), the stage, and when."""

    link: tuple[int, int, str]
    stage: Stage
    chunk: int
    start_s: float
    end_s: float


def timeline(program: Program, routes: Routes, topology: Topology, *, most: int) -> tuple[Crossing, ...]:
    """Every chunk on every link, in order of the simulation of :func:`price`, of the whole call.

    Args:
        most: crossings; a call of more is refused.

    Raises:
        PlanError: as :func:`price`, and for a call of too many crossings.
    """
    model = _Model(program, routes, topology)
    chunks = [-(-stage.count // step) for stage, step in zip(program.stages, model.steps, strict=True)]
    crossings = sum(
        count * sum(len(t.links) for t in transfers) for count, transfers in zip(chunks, model.transfers, strict=True)
    )
    if crossings > most:
        raise PlanError(
            f"{crossings} chunks cross links in this call; a trace takes {most} at most: give fewer --bytes"
        )
    found: list[Crossing] = []
    counts: Counter[tuple[int, int, int]] = Counter()
    names = {number: key for key, number in model.links.items()}

    def seen(i: int, t: int, hop: int, start_s: float, end_s: float) -> None:
        chunk = counts[i, t, hop]
        counts[i, t, hop] += 1
        link = names[model.transfers[i][t].links[hop][0]]
        found.append(Crossing(link, program.stages[i], chunk, start_s, end_s))

    model.play(1.0, seen)
    return tuple(found)


class _Transfer(NamedTuple):
    """One step's chunk to one place: the links that it crosses, as (number, seconds an element), and who gets it."""

    links: tuple[tuple[int, float], ...]
    latency: float
    sinks: tuple[int, ...]  # stages that read it
    sender: tuple[int, float]  # who is busy with the message, by number, and for how many seconds


Seen = Callable[[int, int, int, float, float], None]
Sender = tuple[str, int]  # a stage, or the rank that calls MPI


class _Model:
    """The stages of a program as a network of queues."""

    def __init__(self, program: Program, routes: Routes, topology: Topology) -> None:
        self.program = program
        self.load: dict[Key, float] = defaultdict(float)  # seconds of work on each link for the whole call
        self._links: dict[tuple[int, int], list[Link]] = defaultdict(list)
        for link in topology.links:
            self._links[link.src, link.dst].append(link)
        self._numbers: dict[Key | Sender, int] = {}
        self.links: dict[Key, int] = {}  # numbers of links
        self._routes, self._topology = routes, topology
        self.steps = [program.chunk_of(stage) for stage in program.stages]
        stages = Counter(stage.rank for stage in program.stages)
        self._ctas = ctas_of_a_stage(max(stages.values(), default=1))
        self._gpus = all(device.kind == "gpu" for device in topology.devices)
        reader = {(c, stage.rank): i for i, stage in enumerate(program.stages) for c in stage.ins}
        writer = {c: i for i, stage in enumerate(program.stages) for c in stage.outs}
        self.sources = [tuple(writer[c] for c in stage.ins) for stage in program.stages]
        self.sinks = [
            tuple(sorted(reader[c, r] for c in stage.outs for r in program.channels[c].readers))
            for stage in program.stages
        ]
        cores = {r: self._core(r) for r in range(topology.n)} if _on_cores(routes, topology) else {}
        if cores:
            working = ((i, stage) for i, stage in enumerate(program.stages))
            self.transfers = [self._work(i, cores[s.rank], reader) if s.ins or s.outs else () for i, s in working]
        else:
            self.transfers = [self._crossings(stage, reader) for stage in program.stages]
        self.hops = sum(len(t.links) for transfers in self.transfers for t in transfers)
        own = self._gpus and not any(kind == "net" for _, _, kind in self.links)
        self.slots = rings(program.depth, self._ctas, self._delay()) if own else program.depth

    def _delay(self) -> float:
        """The most chunks that pass a link until the slot of one is free again: it comes, and is passed on."""
        found = [0.0]
        for step, transfers in zip(self.steps, self.transfers, strict=True):
            for transfer in transfers:
                work = step * max((cost for _, cost in transfer.links), default=0.0)
                found.append(2 * (transfer.latency + work) / work if work else 0.0)
        return max(found)

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
        number = self.links[key] = self._numbers.setdefault(key, len(self._numbers))
        return number, seconds / count

    def _work(self, i: int, core: Link, reader: dict[tuple[int, int], int]) -> tuple[_Transfer, ...]:
        """What stage ``i`` costs its rank's core, and the network where its chunks go to other nodes."""
        stage, call = self.program.stages[i], self.program.call
        folds = len(stage.fold) > 1 or any(self.program.channels[c].wide for c in (*stage.ins, *stage.outs))
        width = (accumulator_of if folds else dtype_of)(call.dtype).itemsize
        passes = max(1, len(stage.fold) - 1)
        work = self._on(core, passes * width * stage.count, stage.count)
        sender = work[0], MESSAGE["memory"]
        several = not self._routes.multicast  # who reads what is written once need not be the end of an edge
        away = [x for x in self._crossings(stage, reader, kind="net") if x.links] if several else []
        if len(away) == 1 == len(self.sinks[i]):  # to the network alone, after the core
            return (_Transfer((work, *away[0].links), away[0].latency, away[0].sinks, (work[0], MESSAGE["net"])),)
        sinks = tuple(sink for sink in self.sinks[i] if not any(sink in x.sinks for x in away))
        return (_Transfer((work,), LATENCY["memory"], sinks, sender), *away)

    def _crossings(
        self, stage: Stage, reader: dict[tuple[int, int], int], kind: LinkKind | None = None
    ) -> tuple[_Transfer, ...]:
        """The ways of a stage's chunk to each rank that reads it, or what of them is on links of one kind."""
        found = []
        for c in stage.outs:
            channel = self.program.channels[c]
            width = (accumulator_of if channel.wide else dtype_of)(self.program.call.dtype).itemsize
            for rank in channel.readers:
                links = self._path(channel.tree, stage.rank, rank, partial=channel.partial)
                links = [k for k in links if kind in (None, k.kind)]
                booked = tuple(self._on(link, width * stage.count, stage.count) for link in links)
                latency = max((LATENCY[k.kind] for k in links), default=0.0) if rank < self._topology.n else 0.0
                found.append(_Transfer(booked, latency, (reader[c, rank],), self._sender(stage, links)))
        return tuple(found)

    def _sender(self, stage: Stage, links: list[Link]) -> tuple[int, float]:
        """Who is busy with a message on these links, and how long: a step signals all its readers at once."""
        kinds = {k.kind for k in links if stage.rank < self._topology.n}
        if "net" in kinds:
            return self._numbers.setdefault(("mpi", stage.rank), len(self._numbers)), MESSAGE["net"]
        seconds = max((MESSAGE[kind] for kind in kinds), default=0.0) / self._ctas
        readers = sum(len(self.program.channels[c].readers) for c in stage.outs)
        return self._numbers.setdefault(("stage", id(stage)), len(self._numbers)), seconds / readers

    def _path(self, number: int, src: int, dst: int, *, partial: bool) -> list[Link]:
        """The links from ``src`` to ``dst`` on an edge of tree ``number``: of partial results, one to the root."""
        path = self._routes.route(number, src, dst, partial=partial)
        hops = []
        for a, b in itertools.pairwise(path):
            links = self._links[a, b]
            links = [k for k in links if k.kind in self._routes.links] or links
            if not links:
                raise PlanError(f"{self._topology.name} has no link {a}->{b}, which tree {number} uses; plan again")
            hops.append(max(links, key=lambda k: k.mbps))
        return hops

    def play(self, part: float, seen: Seen | None = None) -> float:
        """Seconds until the last chunk has arrived, for the first ``part`` of every stage's span.

        Args:
            seen: told of each chunk on each link: stage, transfer, hop, beginning and end.
        """
        transfers, sources, sinks, slots, steps = self.transfers, self.sources, self.sinks, self.slots, self.steps
        sizes = [stage.count * part for stage in self.program.stages]
        chunks = [max(1, -int(-size // step)) for size, step in zip(sizes, steps, strict=True)]
        inputs = [dict.fromkeys(senders, 0) for senders in sources]  # chunks that came, by stage that sent them
        ready = [0 if senders else n for senders, n in zip(sources, chunks, strict=True)]  # that came from all of them
        issued = [0] * len(sizes)
        landed = [[0] * len(ways) for ways in transfers]  # chunks of each transfer that arrived
        finished = [0] * len(sizes)  # chunks that a stage is finished with, so that the slots it read are free
        free = [0.0] * len(self._numbers)
        heap: list[tuple[float, int, int, int, int, float, float]] = []
        now, count = 0.0, 0

        def cross(i: int, t: int, hop: int, size: float, tail: float) -> None:
            """Queue a chunk whose head is at link ``hop`` of transfer ``t`` of stage ``i`` now."""
            nonlocal count
            transfer = transfers[i][t]
            link, cost = transfer.links[hop]
            start = max(now, free[link])
            free[link] = start + size * cost
            if seen is not None:
                seen(i, t, hop, start, free[link])
            tail = max(tail, free[link])
            last = hop + 1 == len(transfer.links)
            count += 1
            heapq.heappush(heap, (tail + transfer.latency if last else start, count, i, t, hop + 1, size, tail))

        def send(i: int, t: int, size: float) -> None:
            """Let a chunk into the first link of transfer ``t`` of stage ``i``, as soon as its sender is free."""
            nonlocal count
            sender, seconds = transfers[i][t].sender
            start = max(now, free[sender])
            free[sender] = start + seconds
            if start > now or not transfers[i][t].links:  # none: to the rank itself
                count += 1
                heapq.heappush(heap, (start, count, i, t, 0, size, 0.0))
            else:
                cross(i, t, 0, size, 0.0)

        def advance(i: int) -> None:
            """Start every step of stage ``i`` that has its inputs, and room for its outputs."""
            done = issued[i]
            if done == ready[i]:  # as most often
                return
            until, step, size = min(chunks[i], ready[i]), steps[i], sizes[i]
            for j in sinks[i]:
                if finished[j] + slots < until:
                    until = finished[j] + slots
            for chunk in range(done, until):
                for t in range(len(transfers[i])):
                    send(i, t, min(step, size - chunk * step))
            issued[i] = until
            if not transfers[i]:
                finished[i] = until

        for i in range(len(sizes)):
            advance(i)
        while heap:
            now, _, i, t, hop, size, tail = heapq.heappop(heap)
            if hop < len(transfers[i][t].links):
                cross(i, t, hop, size, tail)
                continue
            landed[i][t] += 1
            before, finished[i] = finished[i], min(landed[i])
            for j in transfers[i][t].sinks:
                inputs[j][i] += 1
                if inputs[j][i] == ready[j] + 1:
                    ready[j] = min(inputs[j].values())
                advance(j)
                for k in () if transfers[j] else sources[j]:  # it is done with what it has read
                    advance(k)
            for j in sources[i] if finished[i] > before else ():
                advance(j)
        return now


def ctas_of_a_stage(stages: int) -> int:
    """About how many CTAs each of so many stages of a GPU has."""
    return max(1, CTAS // stages)


def rings(depth: int, ctas: int, delay: float) -> int:
    """The slots of a channel that count, where each of so many CTAs has ``depth``.

    Args:
        delay: chunks that pass until a slot is free again.
    """
    return max(depth, min(depth * ctas, math.ceil(SPARE * delay)))


def _extrapolated(model: _Model, part: float) -> float:
    """Seconds for the whole, from this part of it and less, or from more until the pipeline is in its steady state."""
    quarter, half = model.play(part / 4), model.play(part / 2)
    before = (half - quarter) / (part / 4)
    for doubling in itertools.count():
        full = model.play(part)
        slope = (full - half) / (part / 2)
        if abs(slope - before) <= STEADY * slope or doubling == DOUBLINGS or 2 * part >= 1:
            break
        half, before, part = full, slope, 2 * part
    return full + slope * (1 - part)


def _on_cores(routes: Routes, topology: Topology) -> bool:
    """Whether the bytes go through a memory that ranks share."""
    memories = {topology.n + j for j, s in enumerate(topology.switches) if s.kind == "memory"}
    return routes.multicast or not memories.isdisjoint(routes.crossed())
