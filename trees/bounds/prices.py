"""A bound by LP duality: the total price of all links over the price of the cheapest tree.

Every tree of weight w costs at least w times the cheapest tree's price, and all trees share the capacity of the links.
A switch cannot copy, so an edge of a tree costs the cheapest path through switches. This bound accounts for that where
cuts do not, for example at a switch with more capacity in than out.

=========================== ===================================================================================
broadcast, reduce           the cheapest arborescence from the root (reduce: against the arcs)
allgather, reduce_scatter   the mean over the ranks of the cheapest arborescence from each
allreduce                   the least, over the ranks, of the cheapest arborescences to it and from it together
alltoall                    the mean over the ranks of the cheapest paths to all others, which may lead through ranks
=========================== ===================================================================================
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..graph.fabric import Arc, Fabric, Path

Costs = NDArray[np.number[Any]]
FAR = 1 << 58  # more than all prices together


class CheapestPaths:
    """The cheapest path between every two ranks, for prices in the order of ``f.arcs``.

    Args:
        both_ways: price links in both directions.
        relay: paths may lead through other ranks, not through switches alone.
    """

    def __init__(self, f: Fabric, prices: Costs, *, both_ways: bool = False, relay: bool = False) -> None:
        self.f = f
        at = {v: i for i, v in enumerate(f.vertices)}
        size = len(at)
        far = FAR if prices.dtype.kind == "i" else np.inf
        way = np.full((size, size), far, prices.dtype)
        tails, heads = np.array([(at[u], at[v]) for u, v in f.arcs], np.int64).T
        way[tails, heads] = prices
        if both_ways:  # a tree of AllReduce loads its edges in both directions
            way = np.minimum(way + way.T, far)
        self._next = np.full((size, size), -1, np.int64)
        self._next[tails, heads] = heads
        for w in range(0 if relay else f.n, size):
            through = way[:, w, None] + way[None, w, :]
            shorter = through < way
            way = np.where(shorter, through, way)
            self._next = np.where(shorter, self._next[:, w, None], self._next)
        self.cost = np.ascontiguousarray(way[: f.n, : f.n])
        np.fill_diagonal(self.cost, far)

    def path(self, u: int, v: int) -> Path:
        """The vertices of the cheapest path from rank ``u`` to rank ``v``."""
        names = self.f.vertices
        steps = [u]
        while steps[-1] != v:
            steps.append(int(self._next[steps[-1], v]))
        return tuple(names[i] for i in steps)


def arborescence(cost: Costs, root: int) -> list[int]:
    """The parent of every vertex in the cheapest arborescence from ``root`` (Chu-Liu 1965, Edmonds 1967).

    Ties go to the lowest parent; the root's own entry is itself.
    """
    n = len(cost)
    parent = cost.argmin(axis=0)
    parent[root] = root
    group, cycles = _groups(parent.tolist(), root)
    if not cycles:
        return [int(p) for p in parent]
    looped = [v for cycle in cycles for v in cycle]
    spent = np.zeros(n, cost.dtype)
    spent[looped] = cost[parent[looped], looped]
    entering = cost - spent
    count = max(group) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for v, g in enumerate(group):
        members[g].append(v)
    firsts = [m[0] for m in members]
    tail = np.tile(np.array(firsts)[:, None], (1, n))  # the best vertex of group a to go to v from
    rows = entering[firsts].copy()
    for g, some in enumerate(members):
        if len(some) > 1:
            best = entering[some].argmin(axis=0)
            tail[g] = np.array(some)[best]
            rows[g] = entering[some].min(axis=0)
    head = np.tile(np.array(firsts)[None, :], (count, 1))
    small = rows[:, firsts].copy()
    for g, some in enumerate(members):
        if len(some) > 1:
            head[:, g] = np.array(some)[rows[:, some].argmin(axis=1)]
            small[:, g] = rows[:, some].min(axis=1)
    np.fill_diagonal(small, FAR if cost.dtype.kind == "i" else np.inf)
    found = arborescence(small, group[root])
    result = parent.tolist()
    for b, a in enumerate(found):
        if b != group[root]:
            v = int(head[a, b])
            result[v] = int(tail[a, v])
    return [int(p) for p in result]


def _groups(parent: list[int], root: int) -> tuple[list[int], list[list[int]]]:
    """Vertices numbered so that those of one cycle share a number, and the cycles."""
    n = len(parent)
    state = [0] * n  # 0 unseen, else the walk that saw it
    state[root] = -1
    cycles: list[list[int]] = []
    for start in range(n):
        v, walk = start, []
        while state[v] == 0:
            state[v] = start + 1
            walk.append(v)
            v = parent[v]
        if state[v] == start + 1 and v in walk:
            cycles.append(walk[walk.index(v) :])
    group, count = [-1] * n, 0
    for cycle in cycles:
        for v in cycle:
            group[v] = count
        count += 1
    for v in range(n):
        if group[v] < 0:
            group[v] = count
            count += 1
    return group, cycles


def tree_cost(cost: Costs, root: int) -> int:
    """The cost of the cheapest arborescence from ``root``, at integer prices."""
    parent = arborescence(cost, root)
    return sum(int(cost[p, v]) for v, p in enumerate(parent) if v != root)


def cheapest(f: Fabric, collective: str, root: int, prices: Mapping[Arc, int]) -> Fraction:
    """The least cost of one unit of the collective's rate, exactly.

    Args:
        f: the links as they are, in whichever direction the trees point.
    """
    by_link = np.array([prices.get(arc, 0) for arc in f.arcs], np.int64)
    cost, ranks = CheapestPaths(f, by_link, relay=collective == "alltoall").cost, range(f.n)
    if collective == "alltoall":
        return Fraction(sum(c for i, row in enumerate(cost.tolist()) for j, c in enumerate(row) if i != j), f.n)
    towards = np.ascontiguousarray(cost.T)
    if collective in ("broadcast", "reduce"):
        return Fraction(tree_cost(cost if collective == "broadcast" else towards, root))
    if collective == "allgather":
        return Fraction(sum(tree_cost(cost, r) for r in ranks), f.n)
    if collective == "reduce_scatter":
        return Fraction(sum(tree_cost(towards, r) for r in ranks), f.n)
    return Fraction(min(tree_cost(cost, r) + tree_cost(towards, r) for r in ranks))
