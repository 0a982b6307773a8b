"""Method ``mwu``: packing by multiplicative weights, Blink's first stage (Garg and Koenemann 1998, Fleischer 2000).

Every arc has a length, at first 1 / capacity. In each step the shortest tree gets as much weight as its smallest arc
carries, and the lengths of its arcs grow with this load; at the end all weights are scaled down to what fits. Lengths
also give a bound, (sum of length x capacity) / (length of the shortest tree), so the loop stops as soon as it is within
``epsilon`` of the best packing. Lengths are floats, weights are exact.
"""

from fractions import Fraction
from math import inf

import numpy as np

from ...errors import PlanError
from ..exact.arborescences import MAX_RANKS
from ..exact.basis import Floats
from ..exact.weights import placed
from ..graph.arborescence import cheapest_arborescence, minimum_spanning_tree
from ..graph.fabric import Arc
from ..graph.logical import Capacities, SpanningTree, ordered, recentre
from ..problem import Problem, Solution


def fits(problem: Problem) -> bool:
    """Collectives of spanning trees from one root or none, on graphs small enough for the dense oracle."""
    spanning = problem.collective in ("broadcast", "reduce", "allreduce")
    return spanning and problem.logical is not None and problem.n <= MAX_RANKS


def plan(problem: Problem) -> Solution:
    """Trees within ``epsilon`` of the best rate of the logical graph."""
    caps = problem.capacities
    shapes, weights = packed(caps, float(problem.options.epsilon))
    return Solution(*placed(caps, shapes, weights))


def packed(caps: Capacities, epsilon: float) -> tuple[list[SpanningTree], dict[int, Fraction]]:
    """Trees in order of their discovery, and their weights in units."""
    steps = int(200 + 40 * len(caps.units) / epsilon**2)  # theory: about (arcs / epsilon^2) log(arcs)
    units, n = caps.units, caps.n
    length = [1 / c for c in units]
    matrix = np.full((n, n), inf)
    for (u, v), k in caps.number.items():
        matrix[u, v] = length[k]
    arcs_of: dict[int, list[Arc]] = {}
    for arc, k in caps.number.items():
        arcs_of.setdefault(k, []).append(arc)
    carried: dict[SpanningTree, int] = {}
    load = [0] * len(units)
    volume, total, most, bound = float(len(units)), 0, 0.0, inf
    for _ in range(steps):
        shape = shortest(caps, matrix)
        spots = [caps.number[arc] for arc in shape.arcs]
        bound = min(bound, volume / sum(length[k] for k in spots))
        amount = min(units[k] for k in spots)
        carried[shape] = carried.get(shape, 0) + amount
        total += amount
        for k in spots:
            load[k] += amount
            most = max(most, load[k] / units[k])
            grown = length[k] * (1 + epsilon * amount / units[k])
            volume += (grown - length[k]) * units[k]
            length[k] = grown
            for u, v in arcs_of[k]:
                matrix[u, v] = grown
        if total >= (1 - epsilon) * bound * most:
            factor = min(Fraction(c, used) for c, used in zip(units, load, strict=True) if used)
            return list(carried), {i: amount * factor for i, amount in enumerate(carried.values())}
    raise PlanError(f"multiplicative weights: not within {epsilon:g} after {steps} trees; take a larger epsilon")


def shortest(caps: Capacities, matrix: Floats) -> SpanningTree:
    """The shortest spanning tree of the kind that the collective needs."""
    if caps.root < 0:
        edges = minimum_spanning_tree(matrix)
        assert edges is not None
        return recentre(SpanningTree(0, tuple(edges)))
    return SpanningTree(caps.root, ordered(caps.root, cheapest_arborescence(matrix, caps.root)))
