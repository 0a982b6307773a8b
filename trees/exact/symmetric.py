"""Method ``symmetric``: machines that look the same from every rank, such as rings, tori, hypercubes, circulants.

These are Cayley graphs of an abelian group. Ranks are read as numbers of several digits; where adding one to a digit
(modulo its size) maps every link to an equally fast one, these translations map rank 0 to each rank in exactly one way.
So one template tree at rank 0 gives the trees of all ranks, and an arc carries as many tree edges as the template has
in the arc's direction. The template is shallowest: every rank picks a parent one hop closer to the root, and one
maximum flow balances the picks over the directions.
"""

from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate
from math import gcd

import numpy as np

from ..graph.fabric import Fabric, Ints
from ..graph.max_flow import MaxFlow
from ..problem import Problem, Solution
from ..tree import Edge, Tree

LEAST_RANKS = 9


class TranslationGroup:
    """The group of translations: ``sums[a, b]`` is the image of ``b`` under the translation that maps 0 to ``a``."""

    def __init__(self, n: int, moduli: list[int]) -> None:
        self.moduli = moduli
        places = [1, *accumulate(moduli, lambda a, b: a * b)][:-1]
        digits = [np.arange(n) // p % q for p, q in zip(places, moduli, strict=True)]
        self.sums = np.zeros((n, n), np.int64)
        for d, p, q in zip(digits, places, moduli, strict=True):
            self.sums += (d[:, None] + d[None, :]) % q * p
        self.back = np.zeros(n, np.int64)
        for d, p, q in zip(digits, places, moduli, strict=True):
            self.back += -d % q * p

    def direction(self, u: int, v: int) -> int:
        """The image of ``v`` under the translation that maps ``u`` to 0."""
        return int(self.sums[self.back[u], v])


def translations(f: Fabric) -> TranslationGroup | None:
    """The translations of a fabric without switches, checked on every link; None if it has none."""
    if len(f.vertices) > f.n or f.n < LEAST_RANKS:
        return None
    if "translations" not in f.memo:
        found = next(_moduli(f, 1, {}), None)
        f.memo["translations"] = TranslationGroup(f.n, found) if found else None
    known: TranslationGroup | None = f.memo["translations"]
    return known


def _moduli(f: Fabric, place: int, tried: dict[tuple[int, int], bool]) -> Iterator[list[int]]:
    """Digit sizes, lowest place first, whose translations all preserve the links; large digits are tried first."""
    rest = f.n // place
    if rest == 1:
        yield []
        return
    for q in range(rest, 1, -1):
        if rest % q == 0 and tried.setdefault((place, q), _keeps(f, place, q)):
            yield from ([q, *more] for more in _moduli(f, place * q, tried))


def _keeps(f: Fabric, place: int, modulus: int) -> bool:
    """Whether adding one to this digit maps links to equally fast links."""
    v = np.arange(f.n)
    digit = v // place % modulus
    image = v + place * ((digit + 1) % modulus - digit)
    ends = np.array(list(f.arcs), np.int64)
    speed = np.array(list(f.arcs.values()), np.int64)
    codes, moved = ends @ (f.n, 1), image[ends] @ (f.n, 1)
    first, second = np.argsort(codes), np.argsort(moved)
    return bool((codes[first] == moved[second]).all() and (speed[first] == speed[second]).all())


def fits(problem: Problem) -> int:
    """Collectives to which every rank contributes, on a fabric that looks the same from each."""
    whole = problem.collective in ("allgather", "reduce_scatter", "allreduce")
    return int(whole and translations(problem.oriented) is not None)


def plan(problem: Problem) -> Solution | str:
    """Trees from every rank at the full speed of its links, or why no template reaches it.

    An AllReduce loads the edges of a tree both ways, which halves the weights.
    """
    f, both = problem.oriented, problem.collective == "allreduce"
    group = translations(f)
    if group is None or (both and not f.even):
        return "some links are slower in one direction"
    speed = {v: c for (u, v), c in f.arcs.items() if u == 0}  # a direction is known by where it leads from rank 0
    picks = _balanced(f, group, speed)
    if picks is None:
        return "shortest paths alone do not use all links alike"
    order, pieces, unit = picks
    edges = {arc: Edge(*arc, arc) for arc in f.arcs}
    each = Fraction(sum(speed.values()), f.n - 1) / (2 if both else 1)
    templates = [(np.array(parents, np.int64), Fraction(size, unit) * each) for size, parents in pieces]
    trees: list[Tree] = []
    for root in range(f.n):
        image = group.sums[root]
        heads = image[order].tolist()
        for parents, weight in templates:
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
    ways = list(speed)
    total, others = sum(speed.values()), f.n - 1
    shared = gcd(*speed.values(), total)
    flow = MaxFlow(f.n + len(ways) + 1)
    sink = f.n + len(ways)
    arcs: dict[int, list[tuple[int, int]]] = {}
    for v in order[1:]:
        flow.arc(0, v, total // shared)
        closer = [u for u in f.backwards.neighbours[v] if level[u] + 1 == level[v]]
        arcs[v] = [(flow.arc(v, f.n + ways.index(group.direction(u, v)), total // shared), u) for u in closer]
    for i, way in enumerate(ways):
        flow.arc(f.n + i, sink, speed[way] // shared * others)
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
