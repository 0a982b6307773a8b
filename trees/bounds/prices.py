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

import numpy as np

from ..graph.arborescence import Costs, cheapest_arborescence
from ..graph.fabric import Arc, Fabric, Path

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


def tree_cost(cost: Costs, root: int) -> int:
    """The cost of the cheapest arborescence from ``root``, at integer prices."""
    parent = cheapest_arborescence(cost, root)
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
