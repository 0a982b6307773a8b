"""The cheapest spanning arborescences of at most so many hops from their root, exactly, over all sets of vertices.

That is hard in general (two levels are facility location), so it is for small graphs. A tree is a row of levels, and
each vertex hangs on the nearest one of the level before. Of two levels the first decides: 2^n sets. With more, the
cheapest trees below each level, over each set of what is left, are worked out from the last level up: 5^n steps.
"""

import numpy as np
from numpy.typing import NDArray

from .arborescence import Costs

MOST_IN_TWO = 16  # vertices: a table of 2^16 sets
MOST = 9  # for any number of levels
Sets = NDArray[np.int64]  # of vertices, as bits


def can_search(n: int, depth: int) -> bool:
    """Whether a graph of ``n`` vertices is small enough for trees of at most so many hops."""
    return depth == 1 or n <= (MOST_IN_TWO if depth == 2 else MOST)


class ShallowArborescences:
    """The cheapest arborescences of at most ``depth`` hops at given costs, from any root.

    Args:
        cost: of the arc from u to v in row u, column v; more than all arcs together on the diagonal, and where there is
            no arc. A tree that costs as much is none.
        depth: one for which :func:`can_search` holds.
    """

    def __init__(self, cost: Costs, depth: int) -> None:
        n = len(cost)
        if cost.dtype.kind == "f":  # sums and differences of infinities are no numbers
            real = np.isfinite(cost)
            cost = np.where(real, cost, 1 + cost[real].sum())
        self.cost, self.depth, self.everybody = cost, depth, (1 << n) - 1
        if depth == 1:
            return
        near = np.full((1 << n, n), cost.diagonal().max(), cost.dtype)  # from the nearest of a set to each vertex
        for v in range(n):
            near[1 << v : 2 << v] = np.minimum(near[: 1 << v], cost[v])
        if depth == 2:
            members = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
            self._others = np.where(members == 1, 0, near)
        else:
            self._hung = _sums(near)  # by level, and set of vertices that hang on it
            self._below = [self._hung]  # by number of hops less one, level, and set of all vertices below it
            for _ in range(depth - 2):
                self._below.append(self._one_higher(self._below[-1]))

    def _one_higher(self, below: Costs) -> Costs:
        """The cheapest trees below each level over each set, of one hop more than those given."""
        best = self._hung.copy()
        for level in range(1, self.everybody):
            rest = _subsets(self.everybody ^ level)  # for levels above it, and for what is left below it
            at = np.ix_(rest, level | rest)
            best[at] = np.minimum(best[at], self._hung[rest, level, None] + below[level, rest])
        return best

    def tree(self, root: int) -> list[int]:
        """The parent of every vertex in the cheapest tree from ``root``; the root's is itself."""
        parent = [root] * len(self.cost)
        level, left = 1 << root, self.everybody ^ (1 << root)
        for hops in range(self.depth, 0, -1):
            chosen = left if hops == 1 or not left else self._next(root, level, left, hops)
            for v in _members(chosen):
                parent[v] = min(_members(level), key=lambda u: (self.cost[u, v], u))
            level, left = chosen, left ^ chosen
        return parent

    def _next(self, root: int, level: int, left: int, hops: int) -> int:
        """The cheapest level below one, where ``left`` is to be reached in at most ``hops``."""
        sets = _subsets(left)[1:]
        if self.depth == 2:
            near = self._others[sets]
            near[:, root] = 0
            total = _sums(self.cost[root : root + 1])[0, sets] + near.sum(axis=1)
        else:
            total = self._hung[level, sets] + self._below[hops - 2][sets, left ^ sets]
        return int(sets[total.argmin()])


def _sums(rows: Costs) -> Costs:
    """For each row the sum over every set of columns."""
    total = np.zeros((len(rows), 1), rows.dtype)
    for column in rows.T:
        total = np.concatenate([total, total + column[:, None]], axis=1)
    return total


def _subsets(some: int) -> Sets:
    """All subsets of a set, the empty one first."""
    found = np.zeros(1, np.int64)
    for v in _members(some):
        found = np.concatenate([found, found | 1 << v])
    return found


def _members(some: int) -> list[int]:
    return [v for v in range(some.bit_length()) if some >> v & 1]
