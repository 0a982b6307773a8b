"""Trees inside the boxes of a cluster: what enters at a rank reaches every rank of its box.

A rank that can send its supply directly to all others is the centre of a star; otherwise the trees of a box are packed
for the supplies of its ranks (:mod:`~..exact.arborescences`). Equal boxes with equal supplies are solved once.
AllReduce loads its trees both ways, so any tree can be rerooted at the rank where a commodity enters.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from ..exact.arborescences import best_arborescences, pack_spanning_trees
from ..graph.boxes import Box
from ..graph.cuts import out_cuts, strength, subset_sums
from ..graph.fabric import star
from ..graph.logical import LogicalGraph, WeightedTree, arcs_from, neighbours_of, place, split_switches
from ..tree import Edge, Tree

Supply = tuple[Fraction, ...]


class BoxTrees:
    """The trees of every box and their unused weights; the links carry ``factor`` times the supplies."""

    def __init__(self, boxes: Sequence[Box], solved: list[tuple[Tree, ...]], factor: Fraction, *, turn: bool) -> None:
        self._boxes, self._solved, self.factor, self._turn = boxes, solved, factor, turn
        self._pools: list[dict[int, list[list[int]]]] = []
        self._edges: dict[tuple[int, int, int], tuple[Edge, ...]] = {}

    def weights(self) -> list[Fraction]:
        """The weights of all trees in MB/s."""
        return [t.weight for trees in {id(s): s for s in self._solved}.values() for t in trees]

    def begin(self, unit: int) -> None:
        """Fill the pools of trees; sizes are in 1/unit MB/s from now on."""
        for trees in self._solved:
            pools: dict[int, list[list[int]]] = {}
            for k, t in enumerate(trees):
                pools.setdefault(-1 if self._turn else t.root, []).append([int(t.weight * unit), k])
            self._pools.append(pools)

    def take(self, box: int, rank: int, size: int) -> list[tuple[int, tuple[Edge, ...]]]:
        """The next trees of ``box`` for ``size`` that enters at its ``rank``."""
        pool = self._pools[box][-1 if self._turn else rank]
        if len(pool) == 1:
            return [(size, self._edges.get((box, pool[0][1], rank)) or self._placed(box, pool[0][1], rank))]
        taken: list[tuple[int, tuple[Edge, ...]]] = []
        while size:
            head = pool[0]
            part = min(size, head[0])
            taken.append((part, self._edges.get((box, head[1], rank)) or self._placed(box, head[1], rank)))
            head[0] -= part
            size -= part
            if not head[0]:
                pool.pop(0)
        return taken

    def _placed(self, box: int, tree: int, rank: int) -> tuple[Edge, ...]:
        """The edges of one tree in the numbers of the whole cluster, away from ``rank``."""
        at = self._boxes[box].vertices
        found = self._solved[box][tree]
        edges = found.edges if found.root == rank else rerooted(found, rank)
        placed = tuple(Edge(at[e.src], at[e.dst], tuple([at[v] for v in e.path])) for e in edges)
        self._edges[box, tree, rank] = placed
        return placed


def rerooted(tree: Tree, root: int) -> tuple[Edge, ...]:
    """The edges of an undirected tree, directed away from ``root``."""
    paths = {(e.src, e.dst): e.path for e in tree.edges}
    arcs = arcs_from(root, neighbours_of(paths))
    paths |= {(v, u): path[::-1] for (u, v), path in paths.items()}
    return tuple(Edge(u, v, paths[u, v]) for u, v in arcs)


def box_trees(boxes: Sequence[Box], supplies: Sequence[Supply], *, both: bool) -> BoxTrees:
    """Trees for the supply of every rank of boxes of at most ``MAX_RANKS`` ranks.

    All supplies shrink by one factor where a box cannot carry them.
    """
    keys = [(b.m, tuple(b.inner.arcs.items()), s) for b, s in zip(boxes, supplies, strict=True)]
    distinct = dict(zip(keys, zip(boxes, supplies, strict=True), strict=True))
    logical = {key: split_switches(b.inner) if b.m > 1 else None for key, (b, _) in distinct.items()}
    stars = both and all(_stars(g, s, both=True) for g, (_, s) in zip(logical.values(), distinct.values(), strict=True))
    factor = Fraction(1)
    for key, (_, supply) in distinct.items():
        g = logical[key]
        if g is not None and not stars:
            factor = min(factor, _limit(g, supply, both=both))
    solved: dict[object, tuple[Tree, ...]] = {}
    for key, (_, supply) in distinct.items():
        g = logical[key]
        wanted = tuple(s * factor for s in supply)
        if g is None:
            solved[key] = (Tree(0, (), wanted[0]),)
        elif stars or (not both and _stars(g, wanted, both=False)):
            solved[key] = _star_trees(g, wanted, both=both)
        elif both:
            trees, unit = pack_spanning_trees(g.matrix())
            solved[key] = place(trees, g, unit, both_ways=True)
        else:
            solved[key] = _grown(g, wanted)
    return BoxTrees(boxes, [solved[key] for key in keys], factor, turn=both and not stars)


def _stars(g: LogicalGraph | None, supply: Supply, *, both: bool) -> bool:
    """Whether every rank can be the centre of one star with its supply."""
    if g is None:
        return True
    pairs = [(u, v) for u in range(g.n) for v in range(g.n) if u != v]
    capacity = {arc: sum(units for _, units in ways) * g.mbps for arc, ways in g.routes.items()}
    return all(capacity.get((u, v), 0) >= supply[u] + (supply[v] if both else 0) for u, v in pairs)


def _star_trees(g: LogicalGraph, supply: Supply, *, both: bool) -> tuple[Tree, ...]:
    units = [s / g.mbps for s in supply]
    scale = lcm(*(u.denominator for u in units))
    grown = [WeightedTree(r, tuple(star(g.n, r)), int(u * scale)) for r, u in enumerate(units) if u]
    return place(grown, g, Fraction(1, scale), both_ways=both)


def _limit(g: LogicalGraph, supply: Supply, *, both: bool) -> Fraction:
    """The factor of the supplies that the cuts (both ways: the partitions) of the box allow."""
    cuts = out_cuts(g.matrix())
    if both:
        return strength(cuts)[0] * g.mbps / sum(supply)
    scale = lcm(*(s.denominator for s in supply))
    loads = subset_sums([int(s * scale) for s in supply])[1:-1]
    ratio: Fraction | None = None
    some = np.flatnonzero(loads)
    while len(some):  # discrete Newton on the least of cut over load
        worst = int(some[0])
        if ratio is not None:
            worst = int(some[np.argmin(cuts[1:-1][some] * ratio.denominator - loads[some] * ratio.numerator)])
        value = Fraction(int(cuts[1 + worst]), int(loads[worst]))
        if ratio is not None and value >= ratio:
            break
        ratio = value
    return Fraction(1) if ratio is None else ratio * scale * g.mbps


def _grown(g: LogicalGraph, supply: Supply) -> tuple[Tree, ...]:
    units = [s / g.mbps for s in supply]
    scale = lcm(*(u.denominator for u in units))
    trees = best_arborescences(g.matrix() * scale, [int(u * scale) for u in units])
    return place(trees, g, Fraction(1, scale))
