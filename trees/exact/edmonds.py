"""Method ``exact``: Edmonds' packings on up to 16 ranks, placed on physical paths; flows for Gather and Scatter.

These functions get the fabric in the direction of the trees' edges: reversed for the collectives whose bytes flow to
the root, the two-way part for AllReduce.
"""

from fractions import Fraction

import numpy as np

from ..graph.cuts import min_cut, ratio_cut
from ..graph.fabric import Fabric, Ints, Kept
from ..graph.logical import WeightedTree, hops_of, logical_graph, place
from ..graph.max_flow import MaxFlow
from ..problem import Problem, Solution
from ..tree import Tree
from .arborescences import MAX_RANKS, best_arborescences, pack_spanning_trees

_EACH: Kept[None, tuple[list[WeightedTree], Fraction]] = Kept()  # trees from every rank, and what each roots
_ROOTED: Kept[int, tuple[list[WeightedTree], int]] = Kept()  # by root: trees from it, and their units


def fits(problem: Problem) -> bool:
    """Gather and Scatter everywhere; trees up to 16 ranks whose switches can be split in closed form."""
    return problem.by_paths or (problem.n <= MAX_RANKS and problem.logical is not None)


def plan(problem: Problem) -> Solution:
    """Trees at the best rate of the logical graph; paths at the bound for Gather and Scatter."""
    f, root, bound = problem.oriented, problem.root, problem.bound
    if problem.by_paths:
        return Solution(flow_paths(f, root, bound), bound, "the paths of a maximum flow")
    return Solution(*optimal_trees(f, problem.collective, root))


def optimal_trees(f: Fabric, collective: str, root: int) -> tuple[tuple[Tree, ...], Fraction]:
    """Trees at the best rate of the logical graph between ranks, and that rate in MB/s.

    Without switches that is the bound itself.
    """
    g = logical_graph(f)
    if collective == "allreduce":
        trees, unit = pack_spanning_trees(g.matrix())
        placed = place(trees, g, unit, both_ways=True)
        return placed, sum((t.weight for t in placed), Fraction(0))
    if collective in ("broadcast", "reduce"):
        trees, units = _from_root(f, root)
        return place(trees, g, Fraction(1)), units * g.mbps
    trees, each = _EACH.once(f, None, lambda: _from_each(g.matrix(), f.n))
    return place(trees, g, Fraction(1, each.denominator)), f.n * each * g.mbps


def _from_each(cap: Ints, n: int) -> tuple[list[WeightedTree], Fraction]:
    """Trees from every rank, and the units that each rank roots."""
    mask, units = ratio_cut(cap, n, None)
    each = Fraction(units, mask.bit_count())
    return best_arborescences(cap * each.denominator, [each.numerator] * n), each


def _from_root(f: Fabric, root: int) -> tuple[list[WeightedTree], int]:
    """Trees from ``root``, and their units; those of another root where swapping the two ranks changes no capacity."""
    memo = _ROOTED.of(f)
    cap = logical_graph(f).matrix()
    for other, (trees, units) in memo.items():
        order = list(range(f.n))
        order[root], order[other] = other, root
        if np.array_equal(cap[np.ix_(order, order)], cap):
            return [WeightedTree(root, tuple((order[u], order[v]) for u, v in t.arcs), t.weight) for t in trees], units
    _, units = min_cut(cap, f.n, root)
    memo[root] = best_arborescences(cap, [units if v == root else 0 for v in range(f.n)]), units
    return memo[root]


def flow_paths(f: Fabric, root: int, rate: Fraction) -> tuple[Tree, ...]:
    """Paths from ``root`` that bring every other rank ``rate / n``; ranks on the way relay.

    Args:
        rate: MB/s, at most the ratio cut.
    """
    each = rate / f.n
    sink = max(f.vertices) + 1
    flow = MaxFlow(sink + 1)
    for (u, v), mbps in f.arcs.items():
        flow.arc(u, v, mbps * each.denominator)
    for v in range(f.n):
        if v != root:
            flow.arc(v, sink, each.numerator)
    flow.run(root, sink)
    paths = flow.paths(root, sink)
    trees = [Tree(root, hops_of(walk[:-1], f.n), Fraction(amount, each.denominator)) for walk, amount in paths]
    return tuple(sorted(trees, key=lambda t: (t.edges[-1].dst, len(t.edges), [e.path for e in t.edges])))
