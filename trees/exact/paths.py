"""Packings that meet their bound: grown trees put on physical paths, and flows for Gather and Scatter.

The fabric given to these functions is the one that the trees point along: turned around for the collectives whose
bytes flow to the root, the two-way part for AllReduce.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ..graph.cuts import min_cut, ratio_cut
from ..graph.fabric import Fabric, Ints, Overlay
from ..graph.flow import Flow
from ..tree import Edge, Tree
from .growth import Grown, best_arborescences, spanning_trees


def grown(f: Fabric, collective: str, root: int) -> tuple[tuple[Tree, ...], Fraction]:
    """Trees at the best rate of the logical graph between ranks, and that rate in MB/s.

    Without switches that is the bound itself.
    """
    o = f.split
    if collective == "allreduce":
        trees, unit = spanning_trees(o.matrix())
        placed = place(trees, o, unit, both_ways=True)
        return placed, sum((t.weight for t in placed), Fraction(0))
    if collective in ("broadcast", "reduce"):
        trees, units = _from_root(f, root)
        return place(trees, o, Fraction(1)), units * o.mbps
    if "ratio" not in f.memo:
        f.memo["ratio"] = _from_each(o.matrix(), f.n)
    trees, each = f.memo["ratio"]
    return place(trees, o, Fraction(1, each.denominator)), f.n * each * o.mbps


def _from_each(cap: Ints, n: int) -> tuple[list[Grown], Fraction]:
    """Trees from every rank, and the units that each rank roots."""
    mask, units = ratio_cut(cap, n, None)
    each = Fraction(units, mask.bit_count())
    return best_arborescences(cap * each.denominator, [each.numerator] * n), each


def _from_root(f: Fabric, root: int) -> tuple[list[Grown], int]:
    """Trees from ``root``, and their units; another root's, if exchanging the two ranks changes no capacity."""
    memo: dict[int, tuple[list[Grown], int]] = f.memo.setdefault("rooted", {})
    cap = f.split.matrix()
    for other, (trees, units) in memo.items():
        order = list(range(f.n))
        order[root], order[other] = other, root
        if np.array_equal(cap[np.ix_(order, order)], cap):
            return [Grown(root, tuple((order[u], order[v]) for u, v in t.arcs), t.weight) for t in trees], units
    _, units = min_cut(cap, f.n, root)
    memo[root] = best_arborescences(cap, [units if v == root else 0 for v in range(f.n)]), units
    return memo[root]


def place(trees: Iterable[Grown], o: Overlay, unit: Fraction, *, both_ways: bool = False) -> tuple[Tree, ...]:
    """Put logical trees on physical paths; one that is thicker than a path is divided among several.

    Args:
        unit: what a weight of 1 is in units of the overlay.
        both_ways: a tree loads both directions of its edges, so that both share what is left.
    """
    room = {arc: [Fraction(units) for _, units in ways] for arc, ways in o.routes.items()}
    placed: list[Tree] = []
    for tree in trees:
        keys = [min(arc, arc[::-1]) if both_ways else arc for arc in tree.arcs]
        rest = tree.weight * unit
        while rest:
            ways = [next(k for k, free in enumerate(room[key]) if free) for key in keys]
            part = min(rest, *(room[key][k] for key, k in zip(keys, ways, strict=True)))
            for key, k in zip(keys, ways, strict=True):
                room[key][k] -= part
            edges = tuple(Edge(u, v, o.routes[u, v][k][0]) for (u, v), k in zip(tree.arcs, ways, strict=True))
            placed.append(Tree(tree.root, edges, part * o.mbps))
            rest -= part
    return tuple(placed)


def paths(f: Fabric, root: int, rate: Fraction) -> tuple[Tree, ...]:
    """Paths from ``root`` that bring every other rank ``rate / n``; ranks on the way relay.

    Args:
        rate: MB/s; must not be above the ratio cut.
    """
    each = rate / f.n
    sink = max(f.vertices) + 1
    flow = Flow(sink + 1)
    for (u, v), mbps in f.arcs.items():
        flow.arc(u, v, mbps * each.denominator)
    for v in range(f.n):
        if v != root:
            flow.arc(v, sink, each.numerator)
    flow.run(root, sink)
    trees = [
        Tree(root, _hops(walk[:-1], f.n), Fraction(amount, each.denominator)) for walk, amount in flow.paths(root, sink)
    ]
    return tuple(sorted(trees, key=lambda t: (t.edges[-1].dst, len(t.edges), [e.path for e in t.edges])))


def _hops(walk: tuple[int, ...], n: int) -> tuple[Edge, ...]:
    """Cut a walk over vertices into hops between ranks."""
    stops = [i for i, v in enumerate(walk) if v < n]
    return tuple(Edge(walk[i], walk[j], walk[i : j + 1]) for i, j in pairwise(stops))
