"""Good trees of a graph that has too many to list: a pool for the programs of :mod:`.few`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from ...errors import ArgumentError
from ..exact.enumeration import Room, Shape, centred
from ..exact.growth import ORDERS, arborescences, spanning_trees
from ..graph.cuts import min_cut
from ..graph.fabric import Arc
from . import mwu
from .mwu import Lengths, ordered

POOL_STEPS = 400
GAIN = -1e-12  # a length that shrinks by less is rounding


def pool(room: Room, max_depth: int | None) -> list[Shape]:
    """Good trees of a graph that has too many to list."""
    if max_depth is not None:
        found, _ = mwu.run(room, shallow_oracle(room, max_depth), 0.1, POOL_STEPS)
        return list(found)
    shapes = dict.fromkeys(mwu.packed(room, 0.1)[0])
    cap = room.logical.matrix()
    if room.root < 0:
        shapes.update(dict.fromkeys(centred(Shape(t.root, t.arcs)) for t in spanning_trees(np.minimum(cap, cap.T))[0]))
    else:
        _, units = min_cut(cap, room.n, room.root)
        supply = [units if v == room.root else 0 for v in range(room.n)]
        for order in ORDERS[:3]:
            shapes.update(dict.fromkeys(Shape(t.root, t.arcs) for t in arborescences(cap, supply, order)))
    return list(shapes)


def shallow_oracle(room: Room, max_depth: int) -> mwu.Oracle:
    """A short tree of at most ``max_depth`` hops; for AllReduce from every possible centre in turn.

    Raises:
        ArgumentError: if no tree is that shallow.
    """
    trees = {r: by_levels(room, r) for r in (range(room.n) if room.root < 0 else [room.root])}
    roots = [r for r, parent in trees.items() if depth_of(parent, r) <= max_depth]
    if not roots:
        raise ArgumentError(f"max_depth {max_depth}: no spanning tree is that shallow; allow more hops")
    turn = 0

    def oracle(matrix: Lengths) -> Shape:
        nonlocal turn
        root = roots[turn % len(roots)]
        turn += 1
        return Shape(root, ordered(root, shortened(matrix, trees[root], root, max_depth)))

    return oracle


def by_levels(room: Room, root: int) -> list[int]:
    """The parents of a tree of least depth."""
    parent = [-1] * room.n
    parent[root] = root
    queue = [root]
    for u in queue:
        for v in range(room.n):
            if parent[v] < 0 and (u, v) in room.spot:
                parent[v] = u
                queue.append(v)
    return parent


def least_depth(room: Room) -> int:
    """Hops of the shallowest spanning tree."""
    roots = range(room.n) if room.root < 0 else [room.root]
    return min(depth_of(by_levels(room, r), r) for r in roots)


def depth_of(parent: Sequence[int], root: int) -> int:
    """Hops to the farthest rank."""
    return max(len(_way_up(parent, root, v)) - 1 for v in range(len(parent)))


def _way_up(parent: Sequence[int], root: int, v: int) -> list[int]:
    way = [v]
    while way[-1] != root:
        way.append(parent[way[-1]])
    return way


def shortened(matrix: Lengths, start: Sequence[int], root: int, max_depth: int) -> list[int]:
    """Hang ranks on nearer parents as long as the tree stays shallow and gets shorter."""
    parent, n = list(start), len(start)
    while True:
        ways = [_way_up(parent, root, v) for v in range(n)]
        best: tuple[float, Arc] = (0.0, (-1, -1))
        for v in range(n):
            if v == root:
                continue
            height = max(w.index(v) for w in ways if v in w)
            for u in range(n):
                if matrix[u][v] < inf and v not in ways[u] and len(ways[u]) + height <= max_depth:
                    best = min(best, (matrix[u][v] - matrix[parent[v]][v], (u, v)))
        if best[0] >= GAIN:
            return parent
        u, v = best[1]
        parent[v] = u
