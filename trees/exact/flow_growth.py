"""Trees grown to the capacity of graphs too large for cut vectors: a maximum flow for each test (Lovasz 1976).

As in :mod:`.growth`, a tree may take the arc (u, v) with weight w while every set X that holds v, and neither u nor the
super-source, keeps what the trees to come need: with the tree's own arcs lowered by w, that much must flow from u and
the super-source to v. A test that fails shows its cut, and the cut gives the weight to try next.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..bounds import newton
from ..graph.fabric import Arc, Fabric, Ints, Overlay
from ..tree import PER_RANK, Tree
from .growth import Grown
from .paths import place

MOST_RANKS = {True: 256, False: 64}  # by whether there is one root: half a minute at most
LIMIT = (1 << 31) - 1  # scipy's flows have 32 bits


def planned(f: Fabric, collective: str, root: int, bound: Fraction) -> tuple[tuple[Tree, ...], Fraction] | None:
    """Trees at the rate ``bound`` in MB/s; nothing where splitting the switches in closed form loses some of it."""
    for o in (f.split, f.rail_split) if len(f.topology.nodes) > 1 else (f.split,):
        units = bound / o.mbps
        scale = (units / f.n if collective in PER_RANK else units).denominator
        cap = o.matrix() * scale
        if int(cap.sum()) + units * scale > LIMIT or _rate(f, o, collective, root) != bound:
            continue
        if collective in PER_RANK:
            supply = [int(units * scale / f.n)] * f.n
        else:
            supply = [int(units * scale) if r == root else 0 for r in range(f.n)]
        return place(grow(cap, supply), o, Fraction(1, scale)), bound
    return None


def _rate(f: Fabric, o: Overlay, collective: str, root: int) -> Fraction:
    """The best rate of the logical arcs, in MB/s."""
    cap = o.matrix()
    arcs = {(int(u), int(v)): int(cap[u, v]) for u, v in np.argwhere(cap)}
    logical = Fabric(f.topology, f.kinds, arcs)
    per_rank = collective in PER_RANK
    side = (
        newton.ratio_side(logical, None, {0}, reverse=False)
        if per_rank
        else newton.min_cut_side(logical, root, reverse=False)
    )
    out = sum(c for (u, v), c in arcs.items() if u in side and v not in side)
    return (Fraction(out * f.n, len(side)) if per_rank else Fraction(out)) * o.mbps


class Residual:
    """What is left of the arcs between ranks and of the super-source's arcs to the roots, ready for flows."""

    def __init__(self, cap: Ints, supply: Sequence[int]) -> None:
        self.n = len(cap)
        tails, heads = np.nonzero(cap)
        source = np.full(2 * self.n, self.n)
        # Arcs between ranks, supplies, and an arc from the super-source to each rank that is open for its test alone.
        self.tails = np.concatenate([tails, source[: self.n], [self.n + 1] * (self.n + 1)])
        self.heads = np.concatenate([heads, np.arange(self.n), np.arange(self.n + 1)])
        self.left = np.concatenate([cap[tails, heads], np.array(supply, np.int64), np.zeros(self.n + 1, np.int64)])
        self.at = {(int(u), int(v)): i for i, (u, v) in enumerate(zip(tails, heads, strict=True))}
        self.first_supply = len(tails)
        self.first_open = len(tails) + self.n
        self.order = np.lexsort((self.heads, self.tails))
        self._place = np.empty_like(self.order)
        self._place[self.order] = np.arange(len(self.order))
        self.starts = np.searchsorted(self.tails[self.order], np.arange(self.n + 3)).astype(np.int32)
        self._columns = self.heads[self.order].astype(np.int32)

    def test(self, left: Ints, need: int, u: int, v: int) -> tuple[int, Ints]:
        """How much flows to ``v`` from ``u`` and the super-source, at most ``need``; the sink's side of the cut."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        data = np.minimum(left, need).astype(np.int32)
        data[self.first_open + self.n] = need
        data[self.first_open + u] = need
        graph = csr_array((data[self.order], self._columns, self.starts), shape=(self.n + 2, self.n + 2))
        found = maximum_flow(graph, self.n + 1, v)
        if found.flow_value >= need:
            return int(found.flow_value), np.zeros(0, np.int64)
        rest = csr_array(graph - found.flow)
        rest.eliminate_zeros()
        outside = np.ones(self.n + 2, bool)
        outside[breadth_first_order(rest, self.n + 1, return_predecessors=False)] = False
        return int(found.flow_value), outside

    def entering(self, left: Ints, side: Ints) -> int:
        """What enters the vertices of ``side``."""
        crossing = side[self.heads[: self.first_open]] & ~side[self.tails[: self.first_open]]
        return int(left[: self.first_open][crossing].sum())


def grow(cap: Ints, supply: Sequence[int]) -> list[Grown]:
    """Pack trees of total weight ``supply[v]`` rooted at each rank v; feasible as in :func:`.growth.arborescences`."""
    net, roots, need = Residual(cap, supply), list(supply), sum(supply)
    trees: list[Grown] = []
    while need:
        tree = _grow_one(net, roots, need)
        for arc in tree.arcs:
            net.left[net.at[arc]] -= tree.weight
        net.left[net.first_supply + tree.root] -= tree.weight
        roots[tree.root] -= tree.weight
        need -= tree.weight
        trees.append(tree)
    return trees


def _grow_one(net: Residual, roots: list[int], need: int) -> Grown:
    """One tree, shallow arcs first; thinner where no arc keeps its weight."""
    root = max(range(net.n), key=lambda v: (roots[v], -v))
    weight, level, arcs = roots[root], {root: 0}, list[Arc]()
    used = [net.first_supply + root]
    near: dict[int, list[int]] = {}
    for u, v in net.at:
        near.setdefault(u, []).append(v)
    while len(level) < net.n:
        options = [
            (level[u], int(net.left[net.at[u, v]]), (u, v))
            for u in level
            for v in near.get(u, ())
            if v not in level and net.left[net.at[u, v]]
        ]
        best: tuple[int, Arc] | None = None
        for _, room, arc in sorted(options, key=lambda o: (o[1] < weight, *o)):
            limit = _limit(net, used, min(weight, room), need, arc, best[0] if best else 0)
            if best is None or limit > best[0]:
                best = limit, arc
            if limit == weight:
                break
        assert best is not None
        assert best[0] > 0
        weight, (u, v) = best
        level[v] = level[u] + 1
        arcs.append((u, v))
        used.append(net.at[u, v])
    return Grown(root, tuple(arcs), weight)


def _limit(net: Residual, used: list[int], weight: int, need: int, arc: Arc, enough: int) -> int:
    """The largest weight up to ``weight`` with which the tree may take ``arc``; 0 if not above ``enough``."""
    own = np.array(used, np.int64)
    while weight > enough:
        left = net.left.copy()
        left[own] -= weight
        value, side = net.test(left, need, *arc)
        if value >= need:
            return weight
        crossing = int((side[net.heads[own]] & ~side[net.tails[own]]).sum())
        weight = (net.entering(net.left, side) - need) // crossing if crossing else 0
    return 0
