"""Method ``onehop``: stars, one for each rank, where all pairs of ranks are joined (Blink section 3, NVSwitch).

They are optimal where all pairs are equally well connected; elsewhere the packing states its gap.
"""

from collections.abc import Mapping
from fractions import Fraction

from ..graph.fabric import FAST, SLOW, Arc, Path, fabric, star
from ..graph.loads import link_loads, scaled
from ..graph.logical import LogicalGraph
from ..problem import Problem, Solution
from ..tree import Edge, Tree

MANY_RANKS = 64  # a cluster of more ranks is left to other methods


def fits(problem: Problem) -> bool:
    """All pairs of ranks are joined."""
    return not _left_to_others(problem) and problem.logical is not None and bool(planes(problem.logical))


def fits_evenly(problem: Problem) -> bool:
    """All pairs of ranks are joined with equal capacity."""
    return fits(problem) and problem.logical is not None and uniform(problem.logical)


def fits_slow_links(problem: Problem) -> bool:
    """PCIe or host links join all pairs, and NVLink some: few bytes take one hop."""
    return not _left_to_others(problem) and not fits(problem) and _on_slow_links(problem) is not None


def _left_to_others(problem: Problem) -> bool:
    return problem.n > MANY_RANKS and bool(problem.boxes)


def plan(problem: Problem) -> Solution:
    """Stars at the best rate that the links carry."""
    taken: Problem | None = problem
    if problem.logical is None or not planes(problem.logical):
        taken = _on_slow_links(problem)
    assert taken is not None
    assert taken.logical is not None
    trees = onehop(taken.n, taken.collective, taken.root, planes(taken.logical))
    rated = scaled(trees, link_loads(taken.collective, trees), taken.fabric.arcs)
    return Solution(*rated, fabric=None if taken is problem else taken.fabric)


def _on_slow_links(problem: Problem) -> Problem | None:
    """The problem on PCIe and host links alone, if some others are beside them, and these join all pairs."""
    slow = fabric(problem.fabric.topology, SLOW)
    if not slow.arcs or not set(FAST) & set(problem.fabric.kinds):
        return None
    part = problem.on(slow)
    return part if part.logical is not None and planes(part.logical) else None


def planes(g: LogicalGraph) -> list[tuple[Fraction, dict[Arc, Path]]]:
    """The ways in which all pairs of ranks are joined, with the share of each; none if some pair is not joined.

    A plane is one switch, or the direct links of a complete graph.
    """
    pairs = [(u, v) for u in range(g.n) for v in range(g.n) if u != v]
    widths = {len(g.routes.get(pair, ())) for pair in pairs}
    if len(widths) != 1 or 0 in widths:
        return []
    count = widths.pop()
    thin = [min(g.routes[pair][k][1] for pair in pairs) for k in range(count)]
    return [(Fraction(thin[k], sum(thin)), {pair: g.routes[pair][k][0] for pair in pairs}) for k in range(count)]


def uniform(g: LogicalGraph) -> bool:
    """All pairs of ranks are joined with equal capacity."""
    amounts = {tuple(units for _, units in ways) for ways in g.routes.values()}
    return len(g.routes) == g.n * (g.n - 1) and len(amounts) == 1


def onehop(n: int, collective: str, root: int, ways: list[tuple[Fraction, dict[Arc, Path]]]) -> list[Tree]:
    """Trees of one hop, for a rate of 1: every rank roots a star with its share.

    A rooted collective has n - 1 two-level trees: the root hands each rank a share, which that rank hands on.
    """
    trees: list[Tree] = []
    for share, hops in ways:
        if collective in ("gather", "scatter", "alltoall"):
            sources = range(n) if collective == "alltoall" else [root]
            shapes = [(r, [(r, v)]) for r in sources for v in range(n) if v != r]
            weight = share / n
        elif collective in ("broadcast", "reduce"):
            shapes = [(root, [(root, i), *star(n, i, leave_out=root)]) for i in range(n) if i != root]
            weight = share / (n - 1)
        else:
            shapes = [(r, star(n, r)) for r in range(n)]
            weight = share / n
        trees += [Tree(r, _edges(arcs, hops), weight) for r, arcs in shapes]
    return trees


def _edges(arcs: list[Arc], hops: Mapping[Arc, Path]) -> tuple[Edge, ...]:
    return tuple(Edge(u, v, hops[u, v]) for u, v in arcs)
