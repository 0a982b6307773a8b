"""The boxes of a cluster: which ranks share a box, and its ports to the network (Blink section 3, "three phases").

A cluster is a fabric whose links stay inside a node or lead to a network switch. A port is a rank with its path to the
network and back, and the capacity of that path. A card behind a PCIe switch is shared evenly by its ranks.
"""

from fractions import Fraction
from functools import cached_property

import msgspec

from ...topology.model import Topology
from ..tree import AGAINST, ALONG
from .fabric import FAST, Arc, Fabric, Path, fabric

LEAST_BOXES = 2


class Port(msgspec.Struct, frozen=True):
    """A rank's path to the network ``up`` and back ``down``, and its MB/s out and in."""

    rank: int
    up: Path
    down: Path
    out: Fraction
    into: Fraction

    @property
    def plane(self) -> int:
        """The network switch that it leads to."""
        return self.up[-1]


class Box(msgspec.Struct, frozen=True, dict=True):
    """The ranks of one node, their ports, and the links among them, numbered from 0 (ranks, then switches)."""

    vertices: tuple[int, ...]
    ports: tuple[Port, ...]
    inner: Fabric

    @property
    def m(self) -> int:
        """The number of ranks."""
        return self.inner.n

    @cached_property
    def out(self) -> Fraction:
        """MB/s that leave the box."""
        return sum((p.out for p in self.ports), Fraction(0))

    @cached_property
    def into(self) -> Fraction:
        """MB/s that enter the box."""
        return sum((p.into for p in self.ports), Fraction(0))


def oriented(f: Fabric, collective: str) -> Fabric:
    """The links in the direction in which the trees of ``collective`` point."""
    if collective in ALONG and collective in AGAINST:
        return f.two_way
    return f.backwards if collective in AGAINST else f


def outside(f: Fabric, vertex: int) -> bool:
    """Whether this is a switch between the boxes."""
    return f.topology.homes[vertex] < 0


def tiered(f: Fabric) -> bool:
    """Whether switches of the network are joined to one another."""
    return any(outside(f, u) and outside(f, v) for u, v in f.arcs)


def boxes_of(f: Fabric, collective: str) -> tuple[Box, ...]:
    """The boxes of a cluster, in the direction of ``collective``; empty where the fabric is not a cluster."""
    t = f.topology
    home = t.homes
    if len(t.nodes) < LEAST_BOXES:
        return ()
    arcs = oriented(f, collective).arcs
    if any(home[u] != home[v] and -1 not in (home[u], home[v]) for u, v in arcs):
        return ()
    fast = oriented(fabric(t, FAST), collective).arcs
    members = f.by_node()
    inside: dict[int, dict[Arc, int]] = {node: {} for node in t.nodes}
    outside: dict[int, list[Arc]] = {node: [] for node in t.nodes}
    for u, v in arcs:
        if home[u] == home[v] != -1:
            inside[home[u]][u, v] = arcs[u, v]
        elif home[u] in members:
            outside[home[u]].append((u, v))
    found: list[Box] = []
    for node in t.nodes:
        ports = _ports(arcs, inside[node], outside[node], t.n)
        quick = {arc: min(c, fast[arc]) for arc, c in inside[node].items() if arc in fast}
        tries = (_inner(t, members[node], some) for some in (quick, inside[node]))
        vertices, inner = next((pair for pair in tries if pair[1] is not None), ((), None))
        if inner is None or not ports:
            return ()
        found.append(Box(vertices, ports, inner))
    return tuple(found)


def _ports(arcs: dict[Arc, int], inside: dict[Arc, int], outside: list[Arc], n: int) -> tuple[Port, ...]:
    """The ports, by rank; lowers the capacity of the links in ``inside`` that they use."""
    ports: list[Port] = []
    for u, net in sorted(outside):
        if (net, u) not in arcs:
            continue
        if u < n:
            ports.append(Port(u, (u, net), (net, u), Fraction(arcs[u, net]), Fraction(arcs[net, u])))
            continue
        users = sorted(r for r, v in inside if v == u and r < n and (u, r) in inside)
        for r in users:
            out = min(Fraction(arcs[u, net], len(users)), Fraction(arcs[r, u]))
            into = min(Fraction(arcs[net, u], len(users)), Fraction(arcs[u, r]))
            ports.append(Port(r, (r, u, net), (net, u, r), out, into))
            for arc, taken in (((r, u), out), ((u, r), into)):
                inside[arc] = max(0, inside[arc] - -(-taken.numerator // taken.denominator))
    for arc in [arc for arc, left in inside.items() if not left]:
        del inside[arc]
    return tuple(sorted(ports, key=lambda p: (p.rank, p.up)))


def _inner(t: Topology, members: list[int], arcs: dict[Arc, int]) -> tuple[tuple[int, ...], Fabric | None]:
    """The box's own vertices and fabric, if it joins its ranks and its switches touch ranks alone."""
    ranks = [v for v in members if v < t.n]
    used = {v for arc in arcs for v in arc}
    vertices = (*ranks, *(v for v in members if v >= t.n and v in used))
    number = {v: i for i, v in enumerate(vertices)}
    switches = tuple(t.switches[v - t.n] for v in vertices[len(ranks) :])
    local = Topology(t.name, tuple(t.devices[v] for v in ranks), switches)
    f = Fabric(local, (), {(number[u], number[v]): c for (u, v), c in sorted(arcs.items())})
    return vertices, f if f.flat and (len(ranks) == 1 or f.serves("allgather", 0)) else None
