"""The best template trees of method ``symmetric``, by a linear program with one row for each orbit of links.

A template at rank 0 stands for its images at all ranks, which load the links of an orbit alike, so the program has few
rows. It is solved by the simplex method in fractions: at the prices of the orbits, the cheapest tree enters (cheapest
paths through switches, Edmonds' arborescence, of equal cost nearer to the root). Every step is a packing, so the search
may stop at any time; where no tree is cheaper than what it has, the prices prove the bound.

Such templates are extremes: on two boxes one crosses the network once, and another one for every rank, with a hundredth
of the vector. So they are mixed at last: the other one crosses twice, with a seventh of the vector.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ..bounds.prices import CheapestPaths
from ..graph.arborescence import Costs, cheapest_arborescence
from ..graph.automorphism import moved_by
from ..graph.fabric import Ints, Path
from ..graph.loads import link_loads, scaled
from ..graph.logical import SpanningTree, ordered, recentre
from ..graph.symmetry import LEAST_RANKS, Symmetry, regular
from ..problem import Problem, Solution
from ..tree import AGAINST, ALONG, Edge, Tree

MOST_RANKS = 160  # two racks of 72 GPUs take a second
MOST_STEPS = 1000
MOST_SCALE = 10**9  # of prices to integers
GRAIN = 10**6  # of prices that are rounded
WHY = "a few shallow templates, turned to every rank"


class TemplateTree(NamedTuple):
    """A tree: the path by which each rank but 0 is reached, and what all its images put on a link, by orbit."""

    ways: tuple[Path, ...]
    loads: tuple[int, ...]

    @property
    def parent(self) -> list[int]:
        """Where each rank is reached from; of rank 0, itself."""
        return [0, *(way[0] for way in self.ways)]


class TemplateProgram:
    """The simplex method over templates: the rows of a basis, the templates in it, and their weights.

    Attributes:
        basis: the template of each row, or None for the room that its orbit has left.
        weights: of the templates, or the room left, in units of the fabric.
        inverse: of the matrix of the basis.
    """

    def __init__(self, problem: Problem, symmetry: Symmetry) -> None:
        self.f, self.symmetry, self.deadline = problem.oriented, symmetry, problem.deadline
        self.both = problem.collective in ALONG and problem.collective in AGAINST
        rows = len(symmetry.times)
        room = {k: self.f.arcs[arc] // self.f.unit for arc, k in symmetry.class_of.items()}
        self.basis: list[TemplateTree | None] = [None] * rows
        self.weights = [Fraction(room[k]) for k in range(rows)]
        self.slowness = [1 / weight for weight in self.weights]
        self.inverse = [[Fraction(i == k) for k in range(rows)] for i in range(rows)]

    def prices(self) -> list[Fraction]:
        """What one unit of each orbit's room is worth."""
        used = [row for row, template in zip(self.inverse, self.basis, strict=True) if template]
        return [sum((row[k] for row in used), Fraction(0)) for k in range(len(self.basis))]

    def step(self) -> bool:
        """Take the cheapest template into the basis, or room that is worth less than none; whether that was of use."""
        prices = self.prices()
        least = min(range(len(prices)), key=prices.__getitem__)
        entering = None if prices[least] < 0 else self._cheapest(prices)
        if entering is None:
            column = [row[least] for row in self.inverse]
        elif _dot(prices, entering.loads) >= 1:
            return False
        else:
            column = self._column(entering)
        self._exchange(entering, column, *self._leaving(column))
        return True

    def mix(self) -> None:
        """Bring templates closer to the one that uses slow links least, as far as rate and depth stay as they are."""
        used = [template for template, weight in zip(self.basis, self.weights, strict=True) if template and weight]
        least, deepest = min(used, key=self._work), max(max(_levels(template.parent)) for template in used)
        for template in used:
            self._mix(template, least, deepest)

    def _mix(self, template: TemplateTree, least: TemplateTree, deepest: int) -> None:
        """Take over one way of ``least`` after the other, where that costs the same and the template then leaves."""
        prices = self.prices()
        for v, way in enumerate(least.ways):
            if self.deadline.late():
                break
            mixed = self._template([*template.ways[:v], way, *template.ways[v + 1 :]])
            better = self._work(mixed) < self._work(template) and _dot(prices, mixed.loads) == 1
            if better and 0 < max(_levels(mixed.parent)) <= deepest:
                column = self._column(mixed)
                weight, at = self._leaving(column)
                if self.basis[at] is template:
                    self._exchange(mixed, column, weight, at)
                    template = mixed

    def _work(self, template: TemplateTree) -> Fraction:
        """How long the links of a tree take for a byte."""
        return _dot(self.slowness, template.loads)

    def _column(self, template: TemplateTree) -> list[Fraction]:
        return [_dot(row, template.loads) for row in self.inverse]

    def _leaving(self, column: Sequence[Fraction]) -> tuple[Fraction, int]:
        """The weight of what enters with ``column`` when a row becomes 0, and that row."""
        return min((self.weights[i] / c, i) for i, c in enumerate(column) if c > 0)

    def _exchange(self, entering: TemplateTree | None, column: Sequence[Fraction], weight: Fraction, at: int) -> None:
        pivot = [value / column[at] for value in self.inverse[at]]
        for i, factor in enumerate(column):
            if factor and i != at:
                self.inverse[i] = [a - factor * b if b else a for a, b in zip(self.inverse[i], pivot, strict=True)]
                self.weights[i] -= factor * weight
        self.inverse[at], self.weights[at], self.basis[at] = pivot, weight, entering

    def _cheapest(self, prices: Sequence[Fraction]) -> TemplateTree:
        """The cheapest tree from rank 0; of those, one of few links and, as far as single edges decide, shallow."""
        scale = lcm(*(price.denominator for price in prices))
        if scale > MOST_SCALE:
            scale = int(GRAIN / max(prices))
        ties = len(self.f.vertices) ** 2  # more links than a tree has
        orbit = self.symmetry.class_of
        by_orbit = [int(p * scale) * int(t) * ties + 1 for p, t in zip(prices, self.symmetry.times, strict=True)]
        metric = CheapestPaths(self.f, np.array([by_orbit[orbit[arc]] for arc in self.f.arcs]), both_ways=self.both)
        parent = _nearer(metric.cost, cheapest_arborescence(metric.cost, 0))
        return self._template([metric.path(parent[v], v) for v in range(1, self.f.n)])

    def _template(self, ways: Sequence[Path]) -> TemplateTree:
        used = (*ways, *(way[::-1] for way in ways)) if self.both else ways
        uses = Counter(self.symmetry.class_of[arc] for way in used for arc in pairwise(way))
        return TemplateTree(tuple(ways), tuple(uses[k] * int(t) for k, t in enumerate(self.symmetry.times)))

    def tree(self, template: TemplateTree, weight: Fraction) -> Tree:
        """A template as a tree; one that is used both ways is rooted where it is shallowest."""
        root, hops = 0, ordered(0, template.parent)
        paths = {(way[0], way[-1]): way for way in template.ways}
        if self.both:
            paths |= {(way[-1], way[0]): way[::-1] for way in template.ways}
            root, hops = recentre(SpanningTree(root, hops))
        return Tree(root, tuple(Edge(u, v, paths[u, v]) for u, v in hops), weight)


def fits(problem: Problem) -> bool:
    """Fabrics with switches, on which there is a symmetry for every rank."""
    f = problem.oriented
    return LEAST_RANKS <= f.n <= MOST_RANKS and len(f.vertices) > f.n and regular(f) is not None


def plan(problem: Problem) -> Solution:
    """Trees from every rank: the images of the best templates."""
    symmetry = regular(problem.oriented)
    assert symmetry is not None
    program = TemplateProgram(problem, symmetry)
    for _ in range(MOST_STEPS):
        if not program.step() or problem.deadline.late():
            break
    program.mix()
    used = [(t, weight) for t, weight in zip(program.basis, program.weights, strict=True) if t and weight]
    one = [program.tree(template, weight) for template, weight in used]
    total = sum((tree.weight for tree in one), Fraction(0)) * problem.n
    one = [replace(tree, weight=tree.weight / total) for tree in one]
    trees = [tree for image in symmetry.images for tree in moved_by(one, image)]
    trees.sort(key=lambda t: (t.root, -t.weight, [e.path for e in t.edges]))
    found = Solution(*scaled(trees, link_loads(problem.collective, trees), problem.fabric.arcs), WHY)
    if not problem.met(found.rate):
        _tighten(problem, program)
    return found


def _nearer(cost: Costs, parent: list[int]) -> list[int]:
    """Hang ranks where it costs the same but is nearer to rank 0, until that changes nothing."""
    found, moved = np.array(parent), True
    while moved:
        moved, level = False, _levels(found.tolist())
        for v in range(1, len(found)):
            same = np.flatnonzero(cost[:, v] == cost[found[v], v])
            best = same[level[same].argmin()]
            if level[best] < level[found[v]]:  # so it is not below v
                found[v], moved = best, True
    nearer: list[int] = found.tolist()
    return nearer


def _levels(parent: Sequence[int]) -> Ints:
    """How many hops each rank is away from rank 0; zeros if some are not below it."""
    level = np.zeros(len(parent), np.int64)
    at = np.arange(len(parent))
    for _ in parent:
        level += at > 0
        at = np.array(parent)[at]
    return level * (not at.any())


def _dot(row: Sequence[Fraction], loads: Sequence[int]) -> Fraction:
    return sum((value * load for value, load in zip(row, loads, strict=True) if load), Fraction(0))


def _tighten(problem: Problem, program: TemplateProgram) -> None:
    """Use the bound of the prices, as exact as they can be said."""
    prices = program.prices()
    if min(prices) < 0:
        return
    turned_back = problem.collective in AGAINST and not program.both
    problem.tighten_by({
        arc[::-1] if turned_back else arc: prices[k] * int(program.symmetry.times[k])
        for arc, k in program.symmetry.class_of.items()
    })  # fmt: skip
