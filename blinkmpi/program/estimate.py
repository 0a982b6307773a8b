"""The cost model in closed form: about what :func:`.cost_model.price` predicts, for a choice among many packings.

Every tree takes the same number of steps, one chunk each. The first chunk's way is summed up hop by hop: on each link
it waits for the chunks that other trees send over the same link at the same distance from their start. Each further
step takes as long as the busiest link works, or as the messages of one step keep their sender busy, or as slots need
to be free again; every CTA of a GPU has slots of its own. Ranks that share a memory are not estimated.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..topology.model import LinkKind, Topology
from ..trees.graph.fabric import Arc
from ..trees.tree import AGAINST, ALONG, Edge, Packing
from .cost_model import LATENCY, MESSAGE, ctas_of_a_stage, rings


class Cost(NamedTuple):
    """Seconds: so many for each step, and so many for each byte of the vector that goes over it."""

    fixed: float = 0.0
    each: float = 0.0

    def then(self, other: "Cost") -> "Cost":
        """This and after it another one."""
        return Cost(self.fixed + other.fixed, self.each + other.each)

    def of(self, nbytes: float) -> float:
        """Seconds for a step that moves its part of ``nbytes``."""
        return self.fixed + self.each * nbytes


class _Link(NamedTuple):
    """What a chunk meets on the links of a hop: latency, the sender's work for a message, seconds for each byte."""

    arcs: tuple[tuple[Arc, float], ...]
    latency: float
    call: float
    message: float
    slowness: float


class _Hop(NamedTuple):
    """An edge in a direction: its tree, its distance from the start of the way up or down, and its links."""

    tree: int
    level: tuple[bool, int]
    src: int
    dst: int
    by: _Link


class Estimate:
    """What a call that is lowered from ``packing`` takes on ``topology``."""

    def __init__(self, packing: Packing, topology: Topology) -> None:
        self._parts = [float(tree.weight / packing.rate) for tree in packing.trees]
        self.largest = max(self._parts)  # the largest part of the vector that one tree carries
        hops = list(_hops(packing, topology))
        self.fill = self._fill(packing, hops)
        work: dict[Arc, float] = defaultdict(float)  # seconds for each byte of the vector
        messages: dict[int, float] = defaultdict(float)  # seconds of a step, of the ranks that send to other nodes
        for hop in hops:
            part = self._parts[hop.tree]
            for arc, slowness in hop.by.arcs:
                work[arc] += part * slowness
            messages[hop.src] += hop.by.call
        self.crosses = any(hop.by.call for hop in hops)  # to other nodes
        of_rank: dict[int, set[tuple[int, bool]]] = defaultdict(set)
        for hop in hops:
            of_rank[hop.src].add((hop.tree, hop.level[0]))
            of_rank[hop.dst].add((hop.tree, hop.level[0]))
        ctas = ctas_of_a_stage(max(map(len, of_rank.values()), default=1))
        gpus = all(device.kind == "gpu" for device in topology.devices)
        self.ctas = ctas if gpus and not self.crosses else 1  # that have slots each
        longest = max((hop.by.call or hop.by.message / ctas for hop in hops), default=0.0)
        busiest = max(work.values(), default=0.0)
        self.step = _most([Cost(max([longest, *messages.values()])), Cost(0.0, busiest)])
        self.cycle = self._cycle(hops)

    def seconds(self, nbytes: int, chunk_bytes: int, depth: int) -> float:
        """Seconds for a vector of ``nbytes``, in chunks of at most ``chunk_bytes`` through ``depth`` slots of a CTA."""
        depth = rings(depth, self.ctas, self.slots(chunk_bytes))
        steps = max(1, -int(-nbytes * self.largest // chunk_bytes))
        part = nbytes / steps
        each = max(cost.of(part) for cost in self.step)
        more = (steps - 1) * each
        if steps > depth:  # the others find a slot that is free again
            cycle = max(cost.of(part) for cost in self.cycle)
            more = max(more, (depth - 1) * each + (steps - depth) / depth * cycle)
        return max(cost.of(part) for cost in self.fill) + more

    def slots(self, chunk_bytes: int) -> float:
        """How many slots of ``chunk_bytes`` each tree needs so that its first rank never waits: bandwidth times delay.

        A slot is free again when its chunk has come to the reader and from there to all that it passes it on to.
        """
        part = chunk_bytes / self.largest
        each = max(cost.of(part) for cost in self.step)
        return max(cost.of(part) for cost in self.cycle) / each if each else 0.0

    def _fill(self, packing: Packing, hops: Sequence[_Hop]) -> list[Cost]:
        """The longest ways of first chunks, from a leaf up to a root and down to a leaf.

        On its way a chunk waits for the tree's other chunks wherever they leave together, and once for those of other
        trees: after that they follow one another.
        """
        own: dict[object, float] = defaultdict(float)  # seconds for each byte of the vector, or of a message
        total: dict[object, float] = defaultdict(float)
        for tree, level, src, _, by in hops:
            for arc, slowness in by.arcs:
                own[tree, level, arc] += self._parts[tree] * slowness
                total[level, arc] += self._parts[tree] * slowness
            if by.call:
                own[tree, level, src] += by.call
                total[level, src] += by.call
        up: list[dict[int, list[Cost]]] = [{} for _ in packing.trees]
        down: list[dict[int, list[Cost]]] = [{} for _ in packing.trees]
        waits = [Cost()] * len(packing.trees)
        for tree, level, src, dst, by in hops:
            transfer = max((own[tree, level, arc] for arc, _ in by.arcs), default=0.0)
            others = max((total[level, arc] - own[tree, level, arc] for arc, _ in by.arcs), default=0.0)
            call = own[tree, level, src] if by.call else 0.0
            wait = total[level, src] - call if by.call else 0.0
            waits[tree] = Cost(max(waits[tree].fixed, wait), max(waits[tree].each, others))
            ways = (up if level[0] else down)[tree]
            came = [Cost(way.fixed + by.latency + call, way.each + transfer) for way in ways.get(src, (Cost(),))]
            ways[dst] = _most([*ways[dst], *came]) if dst in ways else came
        ends = []
        for i, packed in enumerate(packing.trees):
            there = up[i].get(packed.root, [Cost()])
            longest = _most([Cost(), *(way for ways in down[i].values() for way in ways)])
            ends += [a.then(b).then(waits[i]) for a in there for b in longest]
        return _most(ends)

    def _cycle(self, hops: Sequence[_Hop]) -> list[Cost]:
        """The time until a slot is free again: a step and the longest one that passes its chunk on."""
        costs = [Cost(hop.by.latency, self._parts[hop.tree] * hop.by.slowness) for hop in hops]
        onward: dict[tuple[int, bool, int], Cost] = {}
        for hop, cost in zip(hops, costs, strict=True):
            key = hop.tree, hop.level[0], hop.src
            onward[key] = max(cost, onward.get(key, cost))
        found = []
        for hop, cost in zip(hops, costs, strict=True):
            after = onward.get((hop.tree, hop.level[0], hop.dst)) or onward.get((hop.tree, False, hop.dst))
            found.append(cost.then(after) if after else cost)
        return _most(found)


def _hops(packing: Packing, topology: Topology) -> Iterator[_Hop]:
    """All edges in the directions in which bytes cross them, each after those that come to its start."""
    links = {(k.src, k.dst): (k.kind, 1e-6 / k.mbps) for k in sorted(topology.links, key=lambda k: k.mbps)}
    known: dict[tuple[int, ...], _Link] = {}
    for number, tree in enumerate(packing.trees):
        passes: list[tuple[bool, Sequence[Edge]]] = []
        if packing.collective in AGAINST:
            passes.append((True, tree.upward))
        if packing.collective in ALONG:
            passes.append((False, tree.edges))
        for rising, edges in passes:
            distance: dict[int, int] = {}
            for edge in edges:
                if edge.path not in known:
                    known[edge.path] = _link([(arc, *links[arc]) for arc in pairwise(edge.path)])
                hops = distance.get(edge.src, 0)
                distance[edge.dst] = max(hops + 1, distance.get(edge.dst, 0))
                yield _Hop(number, (rising, hops), edge.src, edge.dst, known[edge.path])


def _link(links: Sequence[tuple[Arc, LinkKind, float]]) -> _Link:
    kinds = {kind for _, kind, _ in links}
    return _Link(
        tuple((arc, slowness) for arc, _, slowness in links), max(LATENCY[kind] for kind in kinds),
        MESSAGE["net"] if "net" in kinds else 0.0, max(MESSAGE[kind] for kind in kinds),
        max(slowness for _, _, slowness in links),
    )  # fmt: skip


def _most(costs: Iterable[Cost]) -> list[Cost]:
    """Those that no other one exceeds in both."""
    kept: list[Cost] = []
    for cost in sorted(set(costs), reverse=True):
        if not kept or cost.each > kept[-1].each:
            kept.append(cost)
    return kept or [Cost()]
