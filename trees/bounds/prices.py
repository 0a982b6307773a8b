"""A bound by LP duality: the total price of all links over the price of the cheapest tree.

Every tree of weight w costs at least w times the cheapest tree's price, and all trees share the capacity of the links.
A switch cannot copy, so an edge of a tree costs the cheapest path through switches. This bound accounts for that where
cuts do not, for example at a switch with more capacity in than out.

=========================== ===================================================================================
broadcast, reduce           the cheapest arborescence from the root (reduce: against the arcs)
allgather, reduce_scatter   the mean over the ranks of the cheapest arborescence from each
allreduce                   the least, over the ranks, of the cheapest arborescences to it and from it together
alltoall                    the mean over the ranks of the cheapest paths to all others, which may lead through ranks
scatter, gather             the n-th part of the cheapest paths from the root to all others, or to the root
=========================== ===================================================================================
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..graph.arborescence import Costs, cheapest_arborescence
from ..graph.fabric import Arc, Fabric, Path
from ..graph.shallow_arborescence import ShallowArborescences

FAR = 1 << 58  # more than all prices together
PATHS = ("alltoall", "scatter", "gather")


class CheapestPaths:
    """The cheapest path between every two ranks, for prices in the order of ``f.arcs``.

    Args:
        both_ways: price links in both directions.
        relay: paths may lead through other ranks, not through switches alone.
        depth: in at most so many hops from rank to rank; 0: in any number.
    """

    def __init__(
        self, f: Fabric, prices: Costs, *, both_ways: bool = False, relay: bool = False, depth: int = 0
    ) -> None:
        self.f = f
        at = {v: i for i, v in enumerate(f.vertices)}
        size = len(at)
        far = FAR if prices.dtype.kind == "i" else np.inf
        distance = np.full((size, size), far, prices.dtype)
        tails, heads = np.array([(at[u], at[v]) for u, v in f.arcs], np.int64).T
        distance[tails, heads] = prices
        if both_ways:  # a tree of AllReduce loads its edges in both directions
            distance = np.minimum(distance + distance.T, far)
        self._next = np.full((size, size), -1, np.int64)
        self._next[tails, heads] = heads
        for w in range(0 if relay and not depth else f.n, size):
            through = distance[:, w, None] + distance[None, w, :]
            shorter = through < distance
            distance = np.where(shorter, through, distance)
            self._next = np.where(shorter, self._next[:, w, None], self._next)
        self.cost = np.ascontiguousarray(distance[: f.n, : f.n])
        np.fill_diagonal(self.cost, far)
        self._last: list[NDArray[np.int64]] = []  # by number of hops less two: the rank before the last hop, or -1
        one = self.cost
        for _ in range(depth - 1 if relay else 0):
            through = self.cost[:, :, None] + one[None, :, :]
            best = through.argmin(axis=1)
            shorter = through.min(axis=1) < self.cost
            self._last.append(np.where(shorter, best, -1))
            self.cost = np.where(shorter, through.min(axis=1), self.cost)
            np.fill_diagonal(self.cost, far)

    def path(self, u: int, v: int) -> Path:
        """The vertices of the cheapest path from rank ``u`` to rank ``v``."""
        ends, hops = [v], len(self._last)
        while hops:  # from the last hop back
            before = int(self._last[hops - 1][u, ends[-1]])
            if before >= 0:
                ends.append(before)
            hops -= 1
        found: list[int] = [u]
        for end in reversed(ends):
            found += self._direct(found[-1], end)[1:]
        return tuple(found)

    def _direct(self, u: int, v: int) -> Path:
        """The path without ranks between, or with those that any number of hops may have."""
        names = self.f.vertices
        steps = [u]
        while steps[-1] != v:
            steps.append(int(self._next[steps[-1], v]))
        return tuple(names[i] for i in steps)


def trees_at(cost: Costs, depth: int) -> Callable[[int], list[int]]:
    """What gives the parents in the cheapest arborescence from a root; of at most so many hops, or with 0 of any."""
    if depth:
        return ShallowArborescences(cost, depth).tree
    return lambda root: cheapest_arborescence(cost, root)


def cost_of(cost: Costs, parent: Sequence[int], root: int) -> float:
    """What the edges of an arborescence cost together; exact where costs are integers."""
    total: float = sum(cost[p, v].item() for v, p in enumerate(parent) if v != root)
    return total


def cheapest(f: Fabric, collective: str, root: int, prices: Mapping[Arc, int], depth: int = 0) -> Fraction:
    """The least cost of one unit of the collective's rate, exactly.

    Args:
        f: the links as they are, in whichever direction the trees point.
        depth: of trees and paths of at most so many hops; 0: of any. More than so many ranks as
            :func:`~..graph.shallow_arborescence.can_search` says cannot be asked about.
    """
    by_link = np.array([prices.get(arc, 0) for arc in f.arcs], np.int64)
    cost, ranks = CheapestPaths(f, by_link, relay=collective in PATHS, depth=depth).cost, range(f.n)
    towards = np.ascontiguousarray(cost.T)
    if collective in PATHS:
        pairs = [(u, v) for u in (ranks if collective == "alltoall" else [root]) for v in ranks if u != v]
        distance = towards if collective == "gather" else cost
        return Fraction(sum(int(distance[pair]) for pair in pairs), f.n)

    def least(some: Costs, roots: Iterable[int]) -> list[int]:
        tree = trees_at(some, depth)
        return [int(cost_of(some, tree(r), r)) for r in roots]

    if collective in ("broadcast", "reduce"):
        return Fraction(*least(cost if collective == "broadcast" else towards, [root]))
    if collective == "allgather":
        return Fraction(sum(least(cost, ranks)), f.n)
    if collective == "reduce_scatter":
        return Fraction(sum(least(towards, ranks)), f.n)
    return Fraction(min(map(sum, zip(least(cost, ranks), least(towards, ranks), strict=True))))
