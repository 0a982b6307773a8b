"""Network paths of a hierarchy: how the ranks of each box reach the network, and how much the box can exchange.

A path leads from a rank through switches of its own box to the one network switch. Bytes return by the same path, so it
carries what is left in both directions. Maximum flows find the paths; their cuts limit what a box can exchange, as a
linear function a - b R, while its own links carry the local phases at rate R.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import msgspec

from ...errors import TopologyError
from ...topology.model import Topology
from ..graph.fabric import Arc, Path, fabric
from ..graph.loads import core_loads, link_loads
from ..graph.max_flow import MaxFlow
from ..patterns.shared_memory import core_rates
from ..tree import Packing

Loads = Mapping[Arc, Fraction]


class NetworkPath(NamedTuple):
    """A path from a rank to the network, and the part of its box's exchange that it carries."""

    path: Path
    part: Fraction


class ExchangeLimit(NamedTuple):
    """The box exchanges at most ``room - slope * rate`` MB/s each way."""

    room: Fraction
    slope: Fraction

    def at(self, rate: Fraction) -> Fraction:
        """MB/s that are left at this rate."""
        return self.room - self.slope * rate


class BoxView(msgspec.Struct, frozen=True):
    """One box of a machine: its ranks, its own topology, and the numbers of that topology's vertices in the machine.

    ``arcs`` are the links inside the box and to the network, in the numbers of the machine; ``cores`` holds the copy
    rate of each CPU rank that shares a memory.
    """

    node: int
    ranks: tuple[int, ...]
    vertices: tuple[int, ...]
    local: Topology
    arcs: dict[Arc, int]
    cores: dict[int, int]
    net: int


def box_views(t: Topology) -> tuple[BoxView, ...]:
    """The boxes of a machine, in the order of their nodes.

    Raises:
        TopologyError: where there are not several boxes around one network switch, which every box reaches.
    """
    nets = [t.n + j for j, s in enumerate(t.switches) if s.kind == "net"]
    if len(t.nodes) < 2 or len(nets) != 1:
        raise TopologyError(
            f"{t.name}: has {len(t.nodes)} node(s) and {len(nets)} network switch(es), but a hierarchy joins several "
            "nodes by one network switch; plan it with blinkmpi.trees.pack"
        )
    home = [d.node for d in t.devices] + [s.node for s in t.switches]
    arcs = fabric(t, t.kinds()).arcs
    past = next(((u, v) for u, v in arcs if home[u] != home[v] and nets[0] not in (u, v)), None)
    if past is not None:
        raise TopologyError(
            f"{t.name}: link {past[0]}->{past[1]} joins two nodes past the network switch, which a hierarchy cannot "
            "use; drop the link or plan with blinkmpi.trees.pack"
        )
    numbered = tuple(msgspec.structs.replace(s, name=str(t.n + j)) for j, s in enumerate(t.switches))
    marked = msgspec.structs.replace(t, switches=numbered)
    found: list[BoxView] = []
    for node in t.nodes:
        ranks = t.ranks_of(node)
        vertices = (*ranks, *(int(s.name) for s in marked.subset(ranks).switches))
        local = t.subset(ranks)
        own = {(u, v): c for (u, v), c in arcs.items() if node in (home[u], home[v])}
        memory = local.memory_of(node)
        cores = {vertices[r]: c for r, c in core_rates(local, memory).items()} if memory is not None else {}
        found.append(BoxView(node, ranks, vertices, local, own, cores, nets[0]))
        if not reach(found[-1], out=True) or not reach(found[-1], out=False):
            raise TopologyError(
                f"{t.name}: node {node} has no link to and from the network switch; add one or leave it out"
            )
    return tuple(found)


def reach(s: BoxView, *, out: bool) -> int:
    """The MB/s between all ranks of the box together and an otherwise idle network, in one direction."""
    flow, source, sink, _ = _network(s, {(u, v) if out else (v, u): c for (u, v), c in s.arcs.items()})
    return flow.run(source, sink)


def exchange_limit(s: BoxView, loads: Loads, rate: Fraction) -> ExchangeLimit:
    """The minimum cut between the box's ranks and the network while the local phases run at ``rate``."""
    left = _left(s, loads, rate)
    scale = lcm(*(c.denominator for c, _ in left.values()))
    flow, source, sink, at = _network(s, {arc: int(c * scale) for arc, (c, _) in left.items()})
    flow.run(source, sink)
    side = flow.source_side(source)
    cut = [way for (u, v), (_, way) in left.items() if at[v] not in side and (u in s.ranks or at[u] in side)]
    room, slope = sum(s.arcs[a] for a in cut), sum((loads.get(a, Fraction(0)) for a in cut), Fraction(0))
    return ExchangeLimit(Fraction(room), slope)


def network_paths(s: BoxView, loads: Loads, rate: Fraction) -> tuple[NetworkPath, ...]:
    """The maximum exchange of the box at ``rate``, decomposed into paths; every card is used as far as possible."""
    left = _left(s, loads, rate)
    scale = lcm(*(c.denominator for c, _ in left.values()))
    flow, source, sink, at = _network(s, {arc: int(c * scale) for arc, (c, _) in left.items()})
    total = flow.run(source, sink)
    name = {i: v for v, i in at.items()}
    amounts: dict[Path, int] = {}
    for path, amount in flow.paths(source, sink):
        way = tuple(name[i] for i in path[1:])
        amounts[way] = amounts.get(way, 0) + amount
    return tuple(NetworkPath(path, Fraction(amount, total)) for path, amount in sorted(amounts.items()))


def fixed_paths_limit(
    s: BoxView, taken: Iterable[NetworkPath], loads: Loads, cores: Mapping[int, Fraction], rate: Fraction
) -> ExchangeLimit:
    """The tightest limit of these given paths while the local phases run at ``rate``; a core sends and receives."""
    parts: dict[Arc, Fraction] = {}
    spent: dict[int, Fraction] = {}
    for path, part in taken:
        spent[path[0]] = spent.get(path[0], Fraction(0)) + 2 * part
        for u, v in pairwise(path):
            for arc in ((u, v), (v, u)):
                parts[arc] = parts.get(arc, Fraction(0)) + part
    lines = [
        ExchangeLimit(s.arcs[arc] / part, loads.get(arc, Fraction(0)) / part)
        for arc, part in sorted(parts.items())
        if not set(arc) & set(s.cores)
    ]
    lines += [
        ExchangeLimit(s.cores[r] / part, cores.get(r, Fraction(0)) / part)
        for r, part in sorted(spent.items())
        if r in s.cores
    ]
    return min(lines, key=lambda each: each.at(rate))


def local_loads(
    s: BoxView, parts: Iterable[tuple[Packing, Fraction]]
) -> tuple[dict[Arc, Fraction], dict[int, Fraction]]:
    """The loads of links, or of cores that share a memory, for a rate of 1; a packing serves its part of the vector."""
    loads: dict[Arc, Fraction] = {}
    cores: dict[int, Fraction] = {}
    for p, part in parts:
        if p.multicast:
            for r, load in core_loads(p.collective, p.trees).items():
                cores[s.vertices[r]] = cores.get(s.vertices[r], Fraction(0)) + load * part / p.rate
            continue
        for (u, v), load in link_loads(p.collective, p.trees).items():
            arc = s.vertices[u], s.vertices[v]
            loads[arc] = loads.get(arc, Fraction(0)) + load * part / p.rate
    return loads, cores


def _left(s: BoxView, loads: Loads, rate: Fraction) -> dict[Arc, tuple[Fraction, Arc]]:
    """The capacity that the local phases leave of each link both ways, and the direction that has less."""
    left: dict[Arc, tuple[Fraction, Arc]] = {}
    for u, v in s.arcs:
        if (v, u) in s.arcs:
            each = [(s.arcs[arc] - rate * loads.get(arc, Fraction(0)), arc) for arc in ((u, v), (v, u))]
            room, way = min(each)
            left[u, v] = max(room, Fraction(0)), way
    return left


def _network(s: BoxView, room: Mapping[Arc, int]) -> tuple[MaxFlow, int, int, dict[int, int]]:
    """A flow network from a super-source of all ranks to the network; no path passes through another rank."""
    at = {v: i for i, v in enumerate(sorted({v for arc in room for v in arc} | set(s.ranks) | {s.net}))}
    flow = MaxFlow(len(at) + 1)
    for r in s.ranks:
        flow.arc(len(at), at[r], sum(room.values()))
    for (u, v), c in sorted(room.items()):
        if v not in s.ranks and u != s.net:
            flow.arc(at[u], at[v], c)
    return flow, len(at), at[s.net], at
