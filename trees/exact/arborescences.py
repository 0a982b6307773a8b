"""Exact packings of trees into graphs of up to 16 ranks, without switches (Edmonds 1973, Lovasz 1976, Frank 1978).

Lovasz' proof of Edmonds' theorem grows one tree at a time and keeps every cut large enough for the remaining trees.
Here the slack of all cuts is one vector over the subsets, so a test is one vectorised minimum. A tree gets as much
weight as the cuts allow: few heavy trees instead of many light ones.

AllReduce needs undirected trees. A graph that packs ``p`` of them can be oriented so that ``p`` arborescences from
any one root fit (Frank): the in-degrees come from a Dilworth truncation, the orientation from a maximum flow, and
the arborescences are grown as before.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..graph.cuts import HUGE, has, inner, out_cuts, strength, subset_sums, truncate
from ..graph.fabric import Arc, Ints
from ..graph.logical import WeightedTree, recentre
from .orientation import divided

MAX_RANKS = 16


class CandidateArc(NamedTuple):
    """An arc that may join the tree: the largest weight that the tree may then have, and criteria for the choice."""

    limit: int
    depth: int
    spare: int
    arc: Arc


# Preferences among arcs that keep the weight of the tree; every order gives a full packing, with more or fewer trees.
Order = Callable[[CandidateArc], tuple[int, ...]]
ORDERS: tuple[Order, ...] = (
    lambda c: (c.depth, c.spare, *c.arc),
    lambda c: (-c.limit, c.depth, *c.arc),
    lambda c: (-c.spare, c.depth, *c.arc),
    lambda c: (c.spare, c.depth, *c.arc),
    lambda c: (-c.depth, c.spare, *c.arc),
    lambda c: (c.limit, -c.depth, *c.arc),
)


def pack_arborescences(cap: Ints, supply: Sequence[int], order: Order) -> list[WeightedTree]:
    """Pack trees of total weight ``supply[v]`` rooted at each rank v.

    Args:
        cap: integer capacities between ranks.
        supply: must be feasible: no set of ranks may be entered by less than the supply of the others.
    """
    left = cap.copy()
    roots = list(supply)
    need = sum(roots)
    # The capacity into each subset from the ranks outside it and from the super-root that supplies the roots.
    rem = out_cuts(cap)[::-1] + subset_sums(roots)
    rem[0] = HUGE >> 1
    trees: list[WeightedTree] = []
    while need:
        tree, crossings = _grow_one(left, roots, rem - need, order)
        for arc in tree.arcs:
            left[arc] -= tree.weight
        roots[tree.root] -= tree.weight
        need -= tree.weight
        rem -= tree.weight * crossings
        trees.append(tree)
    return trees


def _grow_one(left: Ints, roots: list[int], slack: Ints, order: Order) -> tuple[WeightedTree, Ints]:
    """One tree, and how many of its arcs enter each subset (the super-root's arc to its root included).

    An arc (u, v) may carry ``w`` when every subset X with v and without u that the tree entered d(X) > 0 times
    already has slack(X) >= w d(X).
    """
    n = len(roots)
    root = max(range(n), key=lambda v: (roots[v], -v))
    weight = roots[root]
    level = {root: 0}
    arcs: list[Arc] = []
    crossings = has(n, root)
    room = left.tolist()
    while len(level) < n:
        bottleneck = np.full(len(slack), HUGE)
        np.floor_divide(slack, crossings, out=bottleneck, where=crossings > 0)
        options: list[CandidateArc] = []
        outside = [v for v in range(n) if v not in level]
        for u, depth in level.items():
            for v in outside:
                if free := room[u][v]:
                    limit = min(free, int(np.minimum.reduce(_with_without(bottleneck, v, u), axis=None)))
                    options.append(CandidateArc(limit, depth + 1, free - weight, (u, v)))
        keep = [c for c in options if c.limit >= weight]
        chosen = min(keep, key=order) if keep else min(options, key=lambda c: (-c.limit, *order(c)))
        weight = min(weight, chosen.limit)
        u, v = chosen.arc
        level[v] = level[u] + 1
        arcs.append(chosen.arc)
        _with_without(crossings, v, u)[...] += 1
    return WeightedTree(root, tuple(arcs), weight), crossings


def _with_without(vector: Ints, inside: int, outside: int) -> Ints:
    """A view of the subsets that hold ``inside`` and not ``outside``."""
    low, high = sorted((inside, outside))
    cube = vector.reshape(-1, 2, 1 << (high - low - 1), 2, 1 << low)
    return cube[:, int(high == inside), :, int(low == inside), :]


def best_arborescences(cap: Ints, supply: Sequence[int]) -> list[WeightedTree]:
    """The packing with the fewest, then the shallowest trees among those of a few orders."""
    orders = ORDERS if len(cap) <= 10 else ORDERS[:1]
    return min((pack_arborescences(cap, supply, order) for order in orders), key=_size)


def _size(trees: list[WeightedTree]) -> tuple[int, int]:
    return len(trees), max(t.depth for t in trees)


def pack_spanning_trees(cap: Ints) -> tuple[list[WeightedTree], Fraction]:
    """Pack undirected trees into symmetric ``cap`` at its Tutte/Nash-Williams number.

    Returns:
        trees rooted at their centres, and one unit of their weights in units of ``cap``.
    """
    number, _ = strength(out_cuts(cap))
    scaled, total = cap * number.denominator, number.numerator
    small = len(cap) <= 10
    tries: list[list[WeightedTree]] = []
    for root in range(len(cap)) if small else [0]:
        supply = [total if v == root else 0 for v in range(len(cap))]
        directed = orient(scaled, root, total)
        for order in (ORDERS[0], ORDERS[4]) if small else ORDERS[:1]:
            tries.append([recentre(tree) for tree in pack_arborescences(directed, supply, order)])
    return min(tries, key=_size), Fraction(1, number.denominator)


def orient(cap: Ints, root: int, trees: int) -> Ints:
    """Split the capacity of every pair into its two directions so that ``trees`` arborescences from ``root`` fit."""
    n = len(cap)
    others = [v for v in range(n) if v != root]
    undirected = np.triu(cap)
    within = inner(undirected[np.ix_(others, others)])
    y, _ = truncate(-(within + trees))
    entering = {v: -value for v, value in zip(others, y, strict=True)}
    entering[root] = int(undirected.sum()) - sum(entering.values())
    return divided(cap, [entering[v] for v in range(n)])
