"""All spanning trees of a small graph, and the best weights for a list of trees (linear and integer programs).

A DGX-1 has 3456 spanning trees, so questions about their number and depth are answered over all of them. A solver's
numbers are floats: :func:`exact_weights` turns them into fractions that fit, and no float leaves this module.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import combinations, product
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from ..graph.fabric import Arc, Overlay
from ..tree import Tree, depth_of
from .growth import Grown, recentre
from .paths import place

MAX_TREES = 20_000
DENOMINATOR = 100_000  # a vertex of these programs has smaller ones; doubles tell them apart
SECONDS = 20.0


class Shape(NamedTuple):
    """A spanning tree without a weight, parents before children."""

    root: int
    arcs: tuple[Arc, ...]

    @property
    def depth(self) -> int:
        """Hops from the root to the farthest rank."""
        return depth_of(self.root, self.arcs)


class Room(NamedTuple):
    """What the trees of a rooted collective, or of AllReduce (``root`` -1), may load.

    ``units`` holds the capacity of each resource, ``spot`` the resource that each logical arc loads. A tree of an
    AllReduce loads both directions of an edge alike, so the two are one resource.
    """

    logical: Overlay
    root: int
    units: tuple[int, ...]
    spot: dict[Arc, int]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.logical.n


def room_of(o: Overlay, root: int) -> Room:
    """The logical arcs of an overlay as resources; ``root`` is -1 for trees that are used both ways."""
    units: list[int] = []
    spot: dict[Arc, int] = {}
    for (u, v), ways in o.routes.items():
        amount = sum(k for _, k in ways)
        if root < 0 and (v, u) in spot:
            spot[u, v] = spot[v, u]
            units[spot[u, v]] = min(units[spot[u, v]], amount)
        else:
            spot[u, v] = len(units)
            units.append(amount)
    return Room(o, root, tuple(units), spot)


def arborescences(arcs: Sequence[Arc], n: int, root: int, max_depth: int) -> Iterator[Shape]:
    """Every spanning tree away from ``root`` of at most this depth, once: a tree is its levels and their parents."""
    near: dict[int, list[int]] = {v: [] for v in range(n)}
    for u, v in sorted(arcs):
        near[v].append(u)

    def below(level: tuple[int, ...], rest: frozenset[int], depth: int, done: tuple[Arc, ...]) -> Iterator[Shape]:
        if not rest:
            yield Shape(root, done)
        elif depth < max_depth:
            open_to = {v: [(u, v) for u in near[v] if u in level] for v in sorted(rest)}
            ready = [v for v, ways in open_to.items() if ways]
            for size in range(len(ready), 0, -1):
                for some in combinations(ready, size):
                    for ways in product(*(open_to[v] for v in some)):
                        yield from below(some, rest - set(some), depth + 1, (*done, *ways))

    yield from below((root,), frozenset(range(n)) - {root}, 0, ())


def all_shapes(room: Room, *, max_depth: int | None = None, limit: int = MAX_TREES) -> list[Shape] | None:
    """Every tree that a packing may use, or None where there are more than ``limit``.

    For AllReduce trees are undirected and rooted at their centre.
    """
    deepest = room.n - 1 if max_depth is None else max_depth
    found: list[Shape] = []
    every = arborescences(list(room.spot), room.n, max(room.root, 0), room.n - 1 if room.root < 0 else deepest)
    for shape in every:
        found.append(centred(shape) if room.root < 0 else shape)
        if len(found) > limit:
            return None
    return [s for s in found if s.depth <= deepest]


def centred(shape: Shape) -> Shape:
    """The same undirected tree, rooted where it is shallowest."""
    grown = recentre(Grown(shape.root, shape.arcs, 1))
    return Shape(grown.root, grown.arcs)


def loads_of(room: Room, shapes: Sequence[Shape]) -> Any:
    """How often each tree (column) loads each resource (row), as a sparse matrix."""
    from scipy.sparse import csr_matrix

    rows = [room.spot[arc] for s in shapes for arc in s.arcs]
    columns = [i for i, s in enumerate(shapes) for _ in s.arcs]
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(room.units), len(shapes)))


def best_weights(room: Room, shapes: Sequence[Shape]) -> dict[int, Fraction]:
    """Weights in units of the most that these trees carry together; trees without weight are left out."""
    from scipy.optimize import linprog

    if not shapes:
        return {}
    solved = linprog(
        -np.ones(len(shapes)), A_ub=loads_of(room, shapes), b_ub=np.array(room.units, float), method="highs-ds"
    )
    return exact_weights(room, shapes, {i: float(w) for i, w in enumerate(np.asarray(solved.x))})


def reweighted(room: Room, shapes: Sequence[Shape], chosen: Sequence[int]) -> dict[int, Fraction]:
    """The best weights for some of the trees."""
    weights = best_weights(room, [shapes[i] for i in chosen])
    return {chosen[i]: w for i, w in weights.items()}


def exact_weights(room: Room, shapes: Sequence[Shape], weights: Mapping[int, float | Fraction]) -> dict[int, Fraction]:
    """The nearest fractions of small denominator, all scaled down alike if they do not fit."""
    exact = {i: Fraction(w).limit_denominator(DENOMINATOR) for i, w in weights.items()}
    exact = {i: w for i, w in sorted(exact.items()) if w > 0}
    loads: dict[int, Fraction] = {}
    for i, w in exact.items():
        for arc in shapes[i].arcs:
            loads[room.spot[arc]] = loads.get(room.spot[arc], Fraction(0)) + w
    factor = min((Fraction(room.units[k]) / load for k, load in loads.items()), default=Fraction(1))
    return {i: w * min(Fraction(1), factor) for i, w in exact.items()}


def placed(room: Room, shapes: Sequence[Shape], weights: Mapping[int, Fraction]) -> tuple[tuple[Tree, ...], Fraction]:
    """The weighted trees on their physical paths, thickest first, and their rate in MB/s."""
    scale = lcm(*(w.denominator for w in weights.values()))
    grown = [Grown(*shapes[i], int(w * scale)) for i, w in weights.items()]
    grown.sort(key=lambda t: (-t.weight, t.depth, t.arcs))
    trees = place(grown, room.logical, Fraction(1, scale), both_ways=room.root < 0)
    return trees, sum((t.weight for t in trees), Fraction(0))


class Answer(NamedTuple):
    """Weights by tree, and whether the integer program was solved to its end."""

    weights: dict[int, Fraction]
    proved: bool


def most_with(room: Room, shapes: Sequence[Shape], count: int, *, nodes: int) -> Answer | None:
    """The most that ``count`` of these trees carry."""
    n = len(shapes)
    return _choose(room, shapes, np.repeat([-1.0, 0.0], n), (np.repeat([0.0, 1.0], n), -np.inf, count), nodes)


def fewest_for(room: Room, shapes: Sequence[Shape], rate: Fraction, *, nodes: int) -> Answer | None:
    """The fewest of these trees that carry ``rate`` units; None if they cannot, or no answer was found."""
    n = len(shapes)
    return _choose(room, shapes, np.repeat([0.0, 1.0], n), (np.repeat([1.0, 0.0], n), float(rate), np.inf), nodes)


def fewest_units(room: Room, shapes: Sequence[Shape], rate: Fraction, *, nodes: int) -> Answer | None:
    """The fewest of these trees, of weight 1 each, that carry ``rate`` units; None as above."""
    ones = np.ones(len(shapes))
    rows = [
        (loads_of(room, shapes), -np.inf, np.array(room.units, float)),
        (ones[None, :], float(-(-rate // 1)), np.inf),
    ]
    x, proved = integer_program(ones, rows, ones, ones, nodes)
    return None if x is None else Answer({i: Fraction(1) for i, taken in enumerate(x) if taken > 0.5}, proved)


def _choose(room: Room, shapes: Sequence[Shape], cost: Any, row: tuple[Any, float, float], nodes: int) -> Answer | None:
    """A weight and a yes or no for each tree: loads fit, and a tree that is not taken weighs nothing."""
    from scipy.sparse import csr_matrix, diags, hstack, identity

    n = len(shapes)
    thick = np.array([min(room.units[room.spot[arc]] for arc in s.arcs) for s in shapes], float)
    load = hstack([loads_of(room, shapes), csr_matrix((len(room.units), n))])
    rows = [
        (load, -np.inf, np.array(room.units, float)),
        (hstack([identity(n), -diags(thick)]), -np.inf, 0.0),
        (row[0][None, :], *row[1:]),
    ]
    x, proved = integer_program(cost, rows, np.concatenate([thick, np.ones(n)]), np.repeat([0, 1], n), nodes)
    if x is None:
        return None
    taken = [i for i in range(n) if x[n + i] > 0.5]
    return Answer(reweighted(room, shapes, taken), proved)  # a linear program's weights are cleaner


def integer_program(cost: Any, rows: Sequence[Any], most: Any, whole: Any, nodes: int) -> tuple[Any, bool]:
    """Least cost with 0 <= x <= most and every (matrix, low, high) of ``rows``; whether it was solved to its end.

    Args:
        whole: 1 for each variable that must be an integer.
        nodes: how many nodes of the search tree to look at; there is a limit of 20 s too.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    with _no_words():
        done = milp(
            cost,
            constraints=[LinearConstraint(*row) for row in rows],
            bounds=Bounds(0, most),
            integrality=np.asarray(whole, np.int64),
            options={"node_limit": nodes, "mip_rel_gap": 0.0, "time_limit": SECONDS, "presolve": False},
        )
    return done.x, bool(done.status == 0)


@contextmanager
def _no_words() -> Iterator[None]:
    """Lead the standard output to the error output: HiGHS prints a line at times, even when it is told to be quiet."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    flush = ctypes.CDLL(None).fflush
    flush(None)
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
