"""A pool of good trees for :mod:`.few`, for graphs that have too many spanning trees to list."""

from collections.abc import Sequence
from math import inf

import numpy as np

from ...errors import ArgumentError
from ..exact.arborescences import ORDERS, pack_arborescences, pack_spanning_trees
from ..exact.enumeration import centred
from ..graph.cuts import min_cut
from ..graph.fabric import Arc
from ..graph.logical import Capacities, SpanningTree, ordered
from . import mwu
from .mwu import Lengths

POOL_STEPS = 400
GAIN = -1e-12  # a smaller change in length is rounding


def pool(caps: Capacities, max_depth: int | None) -> list[SpanningTree]:
    """Good trees of a graph that has too many to list."""
    if max_depth is not None:
        found, _ = mwu.run(caps, shallow_oracle(caps, max_depth), 0.1, POOL_STEPS)
        return list(found)
    shapes = dict.fromkeys(mwu.packed(caps, 0.1)[0])
    cap = caps.logical.matrix()
    if caps.root < 0:
        packed, _ = pack_spanning_trees(np.minimum(cap, cap.T))
        shapes.update(dict.fromkeys(centred(SpanningTree(t.root, t.arcs)) for t in packed))
    else:
        _, units = min_cut(cap, caps.n, caps.root)
        supply = [units if v == caps.root else 0 for v in range(caps.n)]
        for order in ORDERS[:3]:
            shapes.update(dict.fromkeys(SpanningTree(t.root, t.arcs) for t in pack_arborescences(cap, supply, order)))
    return list(shapes)


def shallow_oracle(caps: Capacities, max_depth: int) -> mwu.Oracle:
    """An oracle for short trees of at most ``max_depth`` hops; AllReduce takes every possible centre in turn.

    Raises:
        ArgumentError: if no tree is that shallow.
    """
    trees = {r: by_levels(caps, r) for r in (range(caps.n) if caps.root < 0 else [caps.root])}
    roots = [r for r, parent in trees.items() if depth_of(parent, r) <= max_depth]
    if not roots:
        raise ArgumentError(f"max_depth {max_depth}: no spanning tree is that shallow; allow more hops")
    turn = 0

    def oracle(matrix: Lengths) -> SpanningTree:
        nonlocal turn
        root = roots[turn % len(roots)]
        turn += 1
        return SpanningTree(root, ordered(root, shortened(matrix, trees[root], root, max_depth)))

    return oracle


def by_levels(caps: Capacities, root: int) -> list[int]:
    """The parents of a tree of least depth."""
    parent = [-1] * caps.n
    parent[root] = root
    queue = [root]
    for u in queue:
        for v in range(caps.n):
            if parent[v] < 0 and (u, v) in caps.number:
                parent[v] = u
                queue.append(v)
    return parent


def least_depth(caps: Capacities) -> int:
    """Hops of the shallowest spanning tree."""
    roots = range(caps.n) if caps.root < 0 else [caps.root]
    return min(depth_of(by_levels(caps, r), r) for r in roots)


def depth_of(parent: Sequence[int], root: int) -> int:
    """Hops to the farthest rank."""
    return max(len(_path_up(parent, root, v)) - 1 for v in range(len(parent)))


def _path_up(parent: Sequence[int], root: int, v: int) -> list[int]:
    path = [v]
    while path[-1] != root:
        path.append(parent[path[-1]])
    return path


def shortened(matrix: Lengths, start: Sequence[int], root: int, max_depth: int) -> list[int]:
    """Move ranks to nearer parents as long as the tree stays shallow and gets shorter."""
    parent, n = list(start), len(start)
    while True:
        paths = [_path_up(parent, root, v) for v in range(n)]
        best: tuple[float, Arc] = (0.0, (-1, -1))
        for v in range(n):
            if v == root:
                continue
            height = max(w.index(v) for w in paths if v in w)
            for u in range(n):
                if matrix[u][v] < inf and v not in paths[u] and len(paths[u]) + height <= max_depth:
                    best = min(best, (matrix[u][v] - matrix[parent[v]][v], (u, v)))
        if best[0] >= GAIN:
            return parent
        u, v = best[1]
        parent[v] = u
