"""The best weights for a given list of trees, by linear and integer programs (HiGHS).

A solver answers in floats: :mod:`.basis` turns them into fractions, or the nearest ones that fit are taken; no float
leaves this module.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from ..graph.logical import Capacities, SpanningTree, WeightedTree, place
from ..tree import Tree
from .basis import Floats, exact_basis

DENOMINATOR = 100_000  # a vertex of these programs has smaller ones; doubles tell them apart
SECONDS = 20.0


def loads_of(caps: Capacities, shapes: Sequence[SpanningTree]) -> Any:
    """How often each tree (column) loads each resource (row), as a sparse matrix."""
    from scipy.sparse import csr_matrix

    rows = [caps.number[arc] for s in shapes for arc in s.arcs]
    columns = [i for i, s in enumerate(shapes) for _ in s.arcs]
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(caps.units), len(shapes)))


def best_weights(caps: Capacities, shapes: Sequence[SpanningTree]) -> dict[int, Fraction]:
    """The weights, in units, with which these trees carry most together; trees without weight are left out."""
    from scipy.optimize import linprog

    if not shapes:
        return {}
    loads, capacity = loads_of(caps, shapes), np.array(caps.units)
    solved = linprog(-np.ones(len(shapes)), A_ub=loads, b_ub=capacity.astype(float), method="highs-ds")
    x: Floats = np.asarray(solved.x)
    some = np.flatnonzero(x)
    exact = exact_basis(loads[:, some].toarray().astype(np.int64), capacity, x[some])
    if exact is not None:
        return {int(i): w for i, w in zip(some, exact, strict=True) if w}
    return _nearest(caps, shapes, {int(i): float(x[i]) for i in some})


def reweighted(caps: Capacities, shapes: Sequence[SpanningTree], chosen: Sequence[int]) -> dict[int, Fraction]:
    """The best weights for some of the trees."""
    weights = best_weights(caps, [shapes[i] for i in chosen])
    return {chosen[i]: w for i, w in weights.items()}


def _nearest(caps: Capacities, shapes: Sequence[SpanningTree], weights: Mapping[int, float]) -> dict[int, Fraction]:
    """The nearest fractions of small denominator, all scaled down alike if they do not fit."""
    exact = {i: Fraction(w).limit_denominator(DENOMINATOR) for i, w in weights.items() if w > 0}
    exact = {i: w for i, w in sorted(exact.items()) if w > 0}
    loads: dict[int, Fraction] = {}
    for i, w in exact.items():
        for arc in shapes[i].arcs:
            loads[caps.number[arc]] = loads.get(caps.number[arc], Fraction(0)) + w
    factor = min((Fraction(caps.units[k]) / load for k, load in loads.items()), default=Fraction(1))
    return {i: w * min(Fraction(1), factor) for i, w in exact.items()}


def placed(
    caps: Capacities, shapes: Sequence[SpanningTree], weights: Mapping[int, Fraction]
) -> tuple[tuple[Tree, ...], Fraction]:
    """The weighted trees on their physical paths, heaviest first, and their rate in MB/s."""
    scale = lcm(*(w.denominator for w in weights.values()))
    grown = [WeightedTree(*shapes[i], int(w * scale)) for i, w in weights.items()]
    grown.sort(key=lambda t: (-t.weight, t.depth, t.arcs))
    trees = place(grown, caps.logical, Fraction(1, scale), both_ways=caps.root < 0)
    return trees, sum((t.weight for t in trees), Fraction(0))


class IntegerSolution(NamedTuple):
    """Weights by tree, and whether the integer program was solved to its end."""

    weights: dict[int, Fraction]
    proved: bool


def most_with(caps: Capacities, shapes: Sequence[SpanningTree], count: int, *, nodes: int) -> IntegerSolution | None:
    """The highest rate that ``count`` of these trees carry."""
    n = len(shapes)
    return _choose(caps, shapes, np.repeat([-1.0, 0.0], n), (np.repeat([0.0, 1.0], n), -np.inf, count), nodes)


def fewest_for(
    caps: Capacities, shapes: Sequence[SpanningTree], rate: Fraction, *, nodes: int
) -> IntegerSolution | None:
    """The fewest of these trees that carry ``rate`` units; None if they cannot, or no answer was found."""
    n = len(shapes)
    return _choose(caps, shapes, np.repeat([0.0, 1.0], n), (np.repeat([1.0, 0.0], n), float(rate), np.inf), nodes)


def fewest_units(
    caps: Capacities, shapes: Sequence[SpanningTree], rate: Fraction, *, nodes: int
) -> IntegerSolution | None:
    """The fewest of these trees, of weight 1 each, that carry ``rate`` units; None as above."""
    ones = np.ones(len(shapes))
    rows = [
        (loads_of(caps, shapes), -np.inf, np.array(caps.units, float)),
        (ones[None, :], float(-(-rate // 1)), np.inf),
    ]
    x, proved = integer_program(ones, rows, ones, ones, nodes)
    return None if x is None else IntegerSolution({i: Fraction(1) for i, taken in enumerate(x) if taken > 0.5}, proved)


def _choose(
    caps: Capacities, shapes: Sequence[SpanningTree], cost: Any, row: tuple[Any, float, float], nodes: int
) -> IntegerSolution | None:
    """Solve for a weight and a binary choice for each tree: loads fit, and a tree that is not taken has weight 0."""
    from scipy.sparse import csr_matrix, diags, hstack, identity

    n = len(shapes)
    bottleneck = np.array([min(caps.units[caps.number[arc]] for arc in s.arcs) for s in shapes], float)
    load = hstack([loads_of(caps, shapes), csr_matrix((len(caps.units), n))])
    rows = [
        (load, -np.inf, np.array(caps.units, float)),
        (hstack([identity(n), -diags(bottleneck)]), -np.inf, 0.0),
        (row[0][None, :], *row[1:]),
    ]
    x, proved = integer_program(cost, rows, np.concatenate([bottleneck, np.ones(n)]), np.repeat([0, 1], n), nodes)
    if x is None:
        return None
    taken = [i for i in range(n) if x[n + i] > 0.5]
    return IntegerSolution(reweighted(caps, shapes, taken), proved)  # a linear program's weights are cleaner


def integer_program(cost: Any, rows: Sequence[Any], most: Any, whole: Any, nodes: int) -> tuple[Any, bool]:
    """Least cost with 0 <= x <= most and every (matrix, low, high) of ``rows``; whether it was solved to its end.

    Args:
        whole: 1 for each variable that must be an integer.
        nodes: how many nodes of the search tree to look at; there is a limit of 20 s too.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    with _stdout_to_stderr():
        done = milp(
            cost,
            constraints=[LinearConstraint(*row) for row in rows],
            bounds=Bounds(0, most),
            integrality=np.asarray(whole, np.int64),
            options={"node_limit": nodes, "mip_rel_gap": 0.0, "time_limit": SECONDS, "presolve": False},
        )
    return done.x, bool(done.status == 0)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error: HiGHS sometimes prints a line even when told to be quiet."""
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
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
