"""Method ``chain``: path trees in depth-first order, pipelined; optimal for rooted collectives on a tree of switches.

Chains do not look at capacities: they are scaled to what the links carry, and state their gap.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction

from ..graph.fabric import Arc, Fabric, Path
from ..graph.loads import link_loads, scaled
from ..problem import Problem, Solution
from ..tree import PER_RANK, Edge, Tree


def plan(problem: Problem) -> Solution:
    """Chains at the best rate that the links carry."""
    trees = chain(problem.oriented, problem.collective, problem.root)
    return Solution(*scaled(trees, link_loads(problem.collective, trees), problem.fabric.arcs))


def chain(f: Fabric, collective: str, root: int) -> list[Tree]:
    """Chains in depth-first order, for a rate of 1: on a tree of switches no link is crossed twice in a direction.

    One chain for a rooted collective, the n rotations of a ring otherwise (rooted at their middle for AllReduce).
    Where two neighbours in that order have no path through switches alone, the later rank is attached to the nearest
    earlier one that has such a path.
    """
    hops = f.hops
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
    """Edges that attach every rank to the nearest earlier one that has a path to it."""
    edges: list[Edge] = []
    for at, v in enumerate(order[1:], 1):
        u = next(u for u in reversed(order[:at]) if (u, v) in hops)
        edges.append(Edge(u, v, hops[u, v]))
    return tuple(edges)
