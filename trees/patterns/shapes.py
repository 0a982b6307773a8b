"""Packings of a fixed shape: one-hop stars (Blink section 3, NVSwitch) and chains.

Shapes do not look at capacities beyond the shares of parallel switches; they are scaled to what the links carry.
Stars are optimal where all pairs of ranks are equally well connected, chains for rooted collectives on a tree of
switches, and both state their gap elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from ..graph.fabric import Arc, Fabric, Overlay, Path
from ..tree import PER_RANK, Edge, Tree


def planes(o: Overlay) -> list[tuple[Fraction, dict[Arc, Path]]]:
    """The ways in which all pairs of ranks are joined, with the share of each; none if some pair is not joined.

    A plane is one switch, or the direct links of a complete graph.
    """
    pairs = [(u, v) for u in range(o.n) for v in range(o.n) if u != v]
    widths = {len(o.routes.get(pair, ())) for pair in pairs}
    if len(widths) != 1 or 0 in widths:
        return []
    count = widths.pop()
    thin = [min(o.routes[pair][k][1] for pair in pairs) for k in range(count)]
    return [(Fraction(thin[k], sum(thin)), {pair: o.routes[pair][k][0] for pair in pairs}) for k in range(count)]


def uniform(o: Overlay) -> bool:
    """All pairs of ranks are joined with equal capacity."""
    amounts = {tuple(units for _, units in ways) for ways in o.routes.values()}
    return len(o.routes) == o.n * (o.n - 1) and len(amounts) == 1


def onehop(n: int, collective: str, root: int, ways: list[tuple[Fraction, dict[Arc, Path]]]) -> list[Tree]:
    """Trees of one hop, for a rate of 1: every rank roots a star with its share.

    A rooted collective has n - 1 two-level trees: the root hands each rank a share, which that rank hands on.
    """
    trees: list[Tree] = []
    for share, hops in ways:
        if collective in ("gather", "scatter"):
            shapes = [(root, [(root, v)]) for v in range(n) if v != root]
            weight = share / n
        elif collective in ("broadcast", "reduce"):
            shapes = [(root, [(root, i), *star(n, i, leave_out=root)]) for i in range(n) if i != root]
            weight = share / (n - 1)
        else:
            shapes = [(r, star(n, r)) for r in range(n)]
            weight = share / n
        trees += [Tree(r, _edges(arcs, hops), weight) for r, arcs in shapes]
    return trees


def star(n: int, centre: int, leave_out: int | None = None) -> list[Arc]:
    """The arcs from ``centre`` to every other rank."""
    return [(centre, v) for v in range(n) if v not in (centre, leave_out)]


def chain(f: Fabric, collective: str, root: int) -> list[Tree]:
    """Chains in depth-first order, for a rate of 1: on a tree of switches no link is crossed twice in a direction.

    One chain for a rooted collective, the n rotations of a ring otherwise (rooted at their middle for AllReduce).
    Where two neighbours in that order have no path through switches alone, the later rank hangs on the nearest
    earlier one that has.
    """
    hops = {(u, v): path for u in range(f.n) for v, path in f.hops_from(u).items()}
    if collective in ("broadcast", "reduce", "barrier"):
        return [Tree(root, _attach(depth_first(f, root), hops), Fraction(1))]
    ring = depth_first(f, 0)
    joined = all((u, v) in hops for u, v in zip(ring, ring[1:] + ring[:1], strict=True))
    trees: list[Tree] = []
    for at, rank in enumerate(ring):
        order = ring[at:] + ring[:at] if joined else depth_first(f, rank)
        edges = _attach(order, hops)
        if collective not in PER_RANK and joined:
            middle = f.n // 2
            back = list(reversed(order[: middle + 1]))
            edges = (*_attach(back, hops), *_attach(order[middle:], hops))
            rank = order[middle]
        trees.append(Tree(rank, edges, Fraction(1, f.n)))
    return sorted(trees, key=lambda t: t.root)


def depth_first(f: Fabric, start: int) -> list[int]:
    """The ranks in the order in which a depth-first walk over ranks and switches meets them."""
    return [v for v in _walk(f, start) if v < f.n]


def _walk(f: Fabric, start: int) -> Iterator[int]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        v = todo.pop()
        if v not in seen:
            seen.add(v)
            yield v
            todo += [w for w in reversed(f.neighbours[v]) if w not in seen]


def shallow(f: Fabric, root: int) -> Tree:
    """One spanning tree of least depth."""
    order, edges = [root], list[Edge]()
    for u in order:
        for v, path in sorted(f.hops_from(u).items()):
            if v not in order:
                order.append(v)
                edges.append(Edge(u, v, path))
    return Tree(root, tuple(edges), Fraction(1))


def _attach(order: list[int], hops: Mapping[Arc, Path]) -> tuple[Edge, ...]:
    """Every rank under the nearest earlier one that has a path to it."""
    edges: list[Edge] = []
    for at, v in enumerate(order[1:], 1):
        u = next(u for u in reversed(order[:at]) if (u, v) in hops)
        edges.append(Edge(u, v, hops[u, v]))
    return tuple(edges)


def _edges(arcs: list[Arc], hops: Mapping[Arc, Path]) -> tuple[Edge, ...]:
    return tuple(Edge(u, v, hops[u, v]) for u, v in arcs)
