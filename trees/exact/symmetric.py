"""Method ``symmetric``: machines that look the same from every rank, so that templates at rank 0 give all trees.

Where translations map a fabric without switches onto itself (rings, tori, hypercubes, circulants), an arc carries as
many tree edges as the template has in the arc's direction. The template is shallowest: every rank picks a parent one
hop closer to the root, and one maximum flow balances the picks over the directions.

On fabrics with switches, such as clusters of equal boxes, a linear program finds the templates (:mod:`.templates`).
"""

from bisect import bisect_left
from fractions import Fraction
from itertools import accumulate
from math import gcd

import numpy as np

from ..graph.fabric import Fabric, Ints
from ..graph.max_flow import MaxFlow
from ..graph.symmetry import TranslationGroup, translations
from ..problem import Problem, Solution
from ..tree import Edge, Tree
from . import templates

FROM_EACH = ("allgather", "reduce_scatter", "allreduce")


def fits(problem: Problem) -> bool:
    """Collectives to which every rank contributes, on a fabric that translations map onto itself."""
    return problem.collective in FROM_EACH and translations(problem.oriented) is not None


def fits_templates(problem: Problem) -> bool:
    """The same collectives on a fabric with switches that looks the same from every rank."""
    return problem.collective in FROM_EACH and not fits(problem) and templates.fits(problem)


def plan(problem: Problem) -> Solution | str:
    """Trees from every rank."""
    group = translations(problem.oriented)
    return templates.plan(problem) if group is None else _shortest(problem, group)


def _shortest(problem: Problem, group: TranslationGroup) -> Solution | str:
    """Trees of shortest paths at the full speed of all links, or why no template reaches it.

    An AllReduce loads the edges of a tree both ways, which halves the weights.
    """
    f, both = problem.oriented, problem.collective == "allreduce"
    if both and not f.even:
        return "some links are slower in one direction"
    speed = {v: c for (u, v), c in f.arcs.items() if u == 0}  # a direction is known by where it leads from rank 0
    picks = _balanced(f, group, speed)
    if picks is None:
        return "shortest paths alone do not use all links alike"
    order, pieces, unit = picks
    edges = {arc: Edge(*arc, arc) for arc in f.arcs}
    each = Fraction(sum(speed.values()), f.n - 1) / (2 if both else 1)
    weighted = [(np.array(parents, np.int64), Fraction(size, unit) * each) for size, parents in pieces]
    trees: list[Tree] = []
    for root in range(f.n):
        image = group.sums[root]
        heads = image[order].tolist()
        for parents, weight in weighted:
            chosen = map(edges.__getitem__, zip(image[parents].tolist(), heads, strict=True))
            trees.append(Tree(root, tuple(chosen), weight))
    return Solution(tuple(trees), each * f.n)


def _balanced(
    f: Fabric, group: TranslationGroup, speed: dict[int, int]
) -> tuple[Ints, list[tuple[int, list[int]]], int] | None:
    """Ranks by distance from 0, then sizes with a parent for each of them, in units of the third value."""
    level = {0: 0}
    order = [0]
    for u in order:
        for v in f.neighbours[u]:
            if v not in level:
                level[v] = level[u] + 1
                order.append(v)
    directions = list(speed)
    total, others = sum(speed.values()), f.n - 1
    shared = gcd(*speed.values(), total)
    flow = MaxFlow(f.n + len(directions) + 1)
    sink = f.n + len(directions)
    arcs: dict[int, list[tuple[int, int]]] = {}
    for v in order[1:]:
        flow.arc(0, v, total // shared)
        closer = [u for u in f.backwards.neighbours[v] if level[u] + 1 == level[v]]
        arcs[v] = [(flow.arc(v, f.n + directions.index(group.direction(u, v)), total // shared), u) for u in closer]
    for i, direction in enumerate(directions):
        flow.arc(f.n + i, sink, speed[direction] // shared * others)
    if flow.run(0, sink) < total // shared * others:
        return None
    picks = [[(flow.used(arc), u) for arc, u in arcs[v] if flow.used(arc)] for v in order[1:]]
    ends = [list(accumulate(size for size, _ in pick)) for pick in picks]
    pieces: list[tuple[int, list[int]]] = []
    start = 0
    for end in sorted({e for some in ends for e in some}):
        chosen = [pick[bisect_left(some, end)][1] for pick, some in zip(picks, ends, strict=True)]
        pieces.append((end - start, chosen))
        start = end
    return np.array(order[1:], np.int64), pieces, total // shared
