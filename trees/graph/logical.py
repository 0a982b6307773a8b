"""The logical graph: capacities between ranks alone, switches split away, and its spanning trees on physical paths.

A switch that touches ranks alone is replaced by arcs between these ranks in closed form (Mader's splitting-off, with a
uniform share for every pair). The planners pack trees into the logical graph; :func:`place` puts them on the links.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ...errors import TopologyError
from ..tree import Edge, Tree, depth_of
from .fabric import Arc, Fabric, Ints, Kept, Path


class LogicalGraph(msgspec.Struct, frozen=True, dict=True):
    """Arcs between ranks: ``routes`` lists the physical paths of each with their units of ``mbps`` MB/s."""

    n: int
    mbps: Fraction
    routes: dict[Arc, tuple[tuple[Path, int], ...]]

    def matrix(self) -> Ints:
        """Units between every two ranks."""
        cap = np.zeros((self.n, self.n), np.int64)
        for (u, v), ways in self.routes.items():
            cap[u, v] = sum(units for _, units in ways)
        return cap

    def as_fabric(self, f: Fabric) -> Fabric:
        """The arcs as links between the ranks of the fabric that it is made of; capacities are units."""
        units = {arc: sum(units for _, units in ways) for arc, ways in self.routes.items()}
        return Fabric(f.topology, f.kinds, units)


_LOGICAL: Kept[bool, LogicalGraph] = Kept()  # by whether it is of rails


def logical_graph(f: Fabric, *, rails: bool = False) -> LogicalGraph:
    """:func:`split_switches`, computed once for each fabric."""
    return _LOGICAL.once(f, rails, lambda: split_switches(f, rails=rails))


def split_switches(f: Fabric, *, rails: bool = False) -> LogicalGraph:
    """Split every switch: a pair (u, v) gets the smaller of its share of u's uplink and of v's downlink.

    The result never needs more than the links carry, and loses nothing where all ports of a switch are equal.

    Args:
        rails: the network joins only ranks that have the same index in their nodes.

    Raises:
        TopologyError: where switches are wired to switches.
    """
    if not f.flat:
        raise TopologyError(
            f"{f.topology.name}: switches wired to switches cannot be split in closed form; use method 'chain'"
        )
    shares: dict[Arc, list[tuple[Path, Fraction]]] = {}
    for (u, v), mbps in f.arcs.items():
        if u < f.n and v < f.n:
            shares.setdefault((u, v), []).append(((u, v), Fraction(mbps)))
    t = f.topology
    place = [t.ranks_of(d.node).index(r) for r, d in enumerate(t.devices)] if rails else []
    for w in sorted(f.vertices[f.n :], key=lambda w: (t.switches[w - f.n].kind == "net", w)):
        ports = [(u, v) for u in f.backwards.neighbours[w] for v in f.neighbours[w] if u != v]
        if t.switches[w - f.n].kind == "net":  # ranks that are joined in their box do not use the network
            ports = [(u, v) for u, v in ports if t.devices[u].node != t.devices[v].node or (u, v) not in shares]
            if rails:
                ports = [(u, v) for u, v in ports if place[u] == place[v]]
        ups, downs = Counter(u for u, _ in ports), Counter(v for _, v in ports)
        for u, v in ports:
            part = min(Fraction(f.arcs[u, w], ups[u]), Fraction(f.arcs[w, v], downs[v]))
            shares.setdefault((u, v), []).append(((u, w, v), part))
    amounts = [part for ways in shares.values() for _, part in ways]
    scale = lcm(*(part.denominator for part in amounts))
    unit = gcd(*(int(part * scale) for part in amounts))
    in_units = {arc: tuple((path, int(part * scale) // unit) for path, part in ways) for arc, ways in shares.items()}
    return LogicalGraph(f.n, Fraction(unit, scale), dict(sorted(in_units.items())))


class SpanningTree(NamedTuple):
    """A spanning tree without a weight, parents before children."""

    root: int
    arcs: tuple[Arc, ...]

    @property
    def depth(self) -> int:
        """Hops from the root to the farthest rank."""
        return depth_of(self.root, self.arcs)


class WeightedTree(NamedTuple):
    """A spanning tree, parents before children, and its weight in units."""

    root: int
    arcs: tuple[Arc, ...]
    weight: int

    @property
    def depth(self) -> int:
        """Hops from the root to the farthest rank."""
        return depth_of(self.root, self.arcs)


Rooted = TypeVar("Rooted", SpanningTree, WeightedTree)


def recentre(tree: Rooted) -> Rooted:
    """The same undirected tree, rooted where it is shallowest; the lowest such rank."""
    near = neighbours_of(tree.arcs) or {tree.root: []}
    rooted = (tree._replace(root=r, arcs=arcs_from(r, near)) for r in sorted(near))
    return min(rooted, key=lambda t: (t.depth, t.root))


def neighbours_of(edges: Iterable[Arc]) -> dict[int, list[int]]:
    """The neighbours of every vertex in an undirected graph."""
    near: dict[int, list[int]] = {}
    for u, v in edges:
        near.setdefault(u, []).append(v)
        near.setdefault(v, []).append(u)
    return near


def arcs_from(root: int, near: dict[int, list[int]]) -> tuple[Arc, ...]:
    """The arcs of an undirected tree away from ``root``, level by level."""
    arcs: list[Arc] = []
    seen, queue = {root}, [root]
    for u in queue:
        for v in sorted(near[u]):
            if v not in seen:
                seen.add(v)
                queue.append(v)
                arcs.append((u, v))
    return tuple(arcs)


def hops_of(path: Path, n: int) -> tuple[Edge, ...]:
    """Cut a path over vertices into hops between ranks, of which there are ``n``."""
    at = [i for i, v in enumerate(path) if v < n]
    return tuple(Edge(path[a], path[b], path[a : b + 1]) for a, b in pairwise(at))


def ordered(root: int, parent: Sequence[int]) -> tuple[Arc, ...]:
    """The arcs of a list of parents, level by level."""
    arcs: list[Arc] = []
    reached = [root]
    for u in reached:
        for v, p in enumerate(parent):
            if p == u and v != root:
                arcs.append((u, v))
                reached.append(v)
    return tuple(arcs)


class Capacities(NamedTuple):
    """The capacities that trees share, for a rooted collective or for AllReduce (``root`` -1).

    ``units`` holds the capacity of each resource, ``number`` the resource that each logical arc uses. A tree of an
    AllReduce loads both directions of an edge alike, so the two are one resource.
    """

    logical: LogicalGraph
    root: int
    units: tuple[int, ...]
    number: dict[Arc, int]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.logical.n


def capacities_of(g: LogicalGraph, root: int) -> Capacities:
    """The arcs of a logical graph as resources; ``root`` is -1 for trees that are used both ways."""
    units: list[int] = []
    number: dict[Arc, int] = {}
    for (u, v), ways in g.routes.items():
        amount = sum(k for _, k in ways)
        if root < 0 and (v, u) in number:
            number[u, v] = number[v, u]
            units[number[u, v]] = min(units[number[u, v]], amount)
        else:
            number[u, v] = len(units)
            units.append(amount)
    return Capacities(g, root, tuple(units), number)


def place(
    trees: Iterable[WeightedTree], g: LogicalGraph, unit: Fraction, *, both_ways: bool = False
) -> tuple[Tree, ...]:
    """Put logical trees on physical paths; a tree that is wider than a path is divided among several.

    Args:
        unit: a weight of 1 in units of the logical graph.
        both_ways: a tree loads both directions of its edges, which share what is left.
    """
    room = {arc: [Fraction(units) for _, units in ways] for arc, ways in g.routes.items()}
    placed: list[Tree] = []
    for tree in trees:
        keys = [min(arc, arc[::-1]) if both_ways else arc for arc in tree.arcs]
        rest = tree.weight * unit
        while rest:
            ways = [next(k for k, free in enumerate(room[key]) if free) for key in keys]
            part = min(rest, *(room[key][k] for key, k in zip(keys, ways, strict=True)))
            for key, k in zip(keys, ways, strict=True):
                room[key][k] -= part
            edges = tuple(Edge(u, v, g.routes[u, v][k][0]) for (u, v), k in zip(tree.arcs, ways, strict=True))
            placed.append(Tree(tree.root, edges, part * g.mbps))
            rest -= part
    return tuple(placed)
