"""All spanning trees of a small graph.

A DGX-1 has 3456 spanning trees, so questions about their number and depth are answered over all of them.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from ..graph.fabric import Arc
from ..graph.logical import Capacities, SpanningTree, recentre

MAX_TREES = 20_000


def all_arborescences(arcs: Sequence[Arc], n: int, root: int, max_depth: int) -> Iterator[SpanningTree]:
    """Every spanning tree away from ``root`` of at most this depth, once: level by level."""
    near: dict[int, list[int]] = {v: [] for v in range(n)}
    for u, v in sorted(arcs):
        near[v].append(u)

    def below(
        level: tuple[int, ...], rest: frozenset[int], depth: int, done: tuple[Arc, ...]
    ) -> Iterator[SpanningTree]:
        if not rest:
            yield SpanningTree(root, done)
        elif depth < max_depth:
            open_to = {v: [(u, v) for u in near[v] if u in level] for v in sorted(rest)}
            ready = [v for v, ways in open_to.items() if ways]
            if depth + 1 == max_depth and len(ready) < len(rest):
                return
            fewest = len(rest) if depth + 1 == max_depth else 1
            for size in range(len(ready), fewest - 1, -1):
                for some in combinations(ready, size):
                    for ways in product(*(open_to[v] for v in some)):
                        yield from below(some, rest - set(some), depth + 1, (*done, *ways))

    yield from below((root,), frozenset(range(n)) - {root}, 0, ())


def all_spanning_trees(
    caps: Capacities, *, max_depth: int | None = None, limit: int = MAX_TREES
) -> list[SpanningTree] | None:
    """Every tree that a packing may use, or None where there are more than ``limit``.

    For AllReduce trees are undirected and rooted at their centre.
    """
    deepest = caps.n - 1 if max_depth is None else max_depth
    found: list[SpanningTree] = []
    every = all_arborescences(list(caps.number), caps.n, max(caps.root, 0), caps.n - 1 if caps.root < 0 else deepest)
    for shape in every:
        found.append(recentre(shape) if caps.root < 0 else shape)
        if len(found) > limit:
            return None
    return [s for s in found if s.depth <= deepest]
