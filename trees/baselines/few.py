"""Method ``few``: the best rate under a limit on the number or depth of trees, and proofs that fewer do not suffice.

Linear and integer programs find the best of all spanning trees, where a graph has at most ``MAX_TREES`` of them.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ...errors import ArgumentError
from ..exact.edmonds import optimal_trees
from ..exact.enumeration import MAX_TREES, all_spanning_trees
from ..exact.weights import best_weights, fewest_for, most_with, placed, reweighted
from ..graph.fabric import name_of
from ..graph.logical import Capacities, SpanningTree
from ..problem import Problem, Solution

Weights = dict[int, Fraction]
NODES = 100
SEARCHED = 4_000
STARTS = 200
CUT_RANKS = 12


def plan(problem: Problem) -> Solution | str:
    """The best rate with at most ``max_trees`` trees of at most ``max_depth`` hops; the fewest trees at that rate."""
    caps, options = problem.capacities, problem.options
    shapes = candidates(caps, options.max_depth)
    if shapes is None:
        return f"there are more than {MAX_TREES} spanning trees to choose from"
    best = best_weights(caps, shapes)
    ceiling = rate_of(best)
    within = f" of depth {options.max_depth}" if options.max_depth is not None else ""
    of_all = f"of all {len(shapes)} spanning trees{within}"
    if options.max_trees is None or len(best) <= options.max_trees:
        return _all_the_rate(problem, caps, shapes, best, told=of_all)
    count = options.max_trees
    chosen, proof = climb(caps, shapes, best, count)[count], f"the best found {of_all}"
    cut, most = widest(caps, count)
    top = min(ceiling, most)
    if rate_of(chosen) < top and len(shapes) <= searched(caps):
        answer = most_with(caps, shapes, count, nodes=NODES)
        if answer is not None and rate_of(answer.weights) >= rate_of(chosen):
            chosen = answer.weights
            if answer.proved:
                proof = f"the most that {count} {of_all} carry (integer program)"
    if rate_of(chosen) == most:
        proof = f"as many as {count} trees can carry into {name_of(problem.fabric.topology, cut)}"
    elif rate_of(chosen) == top:
        proof = f"the best rate {of_all}"
    trees, rate = placed(caps, shapes, chosen)
    if len(trees) > count:  # heavy trees were divided among parallel paths
        trees = tuple(sorted(trees, key=lambda t: -t.weight)[:count])
        rate = sum((t.weight for t in trees), Fraction(0))
    return Solution(trees, rate, f"{len(trees)} trees, {proof}")


def _all_the_rate(
    problem: Problem, caps: Capacities, shapes: Sequence[SpanningTree], best: Weights, *, told: str
) -> Solution:
    """The fewest trees found, by four heuristics, that reach the rate of ``best``."""
    rate = rate_of(best)
    found = [best, *(w for w in climb(caps, shapes, best, len(best)).values() if rate_of(w) == rate)]
    if len(shapes) <= searched(caps):
        answer = fewest_for(caps, shapes, rate, nodes=NODES)
        if answer is not None and rate_of(answer.weights) == rate:
            found.append(answer.weights)
    trees, mbps = placed(caps, shapes, min(found, key=len))
    other, reached = optimal_trees(problem.oriented, problem.collective, problem.root)
    deepest = problem.options.max_depth or problem.n
    if reached == mbps and len(other) < len(trees) and max(t.depth for t in other) <= deepest:
        trees = other
    return Solution(trees, mbps, f"{len(trees)} trees, the best rate {told}")


def candidates(caps: Capacities, max_depth: int | None = None) -> list[SpanningTree] | None:
    """All spanning trees of at most so many hops, shallow ones first; None where there are more than ``MAX_TREES``.

    Raises:
        ArgumentError: if no tree is that shallow.
    """
    shapes = all_spanning_trees(caps, max_depth=max_depth)
    if shapes is not None and not shapes:
        raise ArgumentError(f"max_depth {max_depth}: no spanning tree is that shallow; allow more hops")
    return None if shapes is None else sorted(shapes, key=lambda s: (s.depth, s))


def searched(caps: Capacities) -> int:
    """The number of trees that the integer programs can choose from in a few seconds."""
    return SEARCHED if caps.root >= 0 else SEARCHED // 10


def rate_of(weights: Weights) -> Fraction:
    """The rate of all trees together, in units."""
    return sum(weights.values(), Fraction(0))


def climb(caps: Capacities, shapes: Sequence[SpanningTree], best: Weights, count: int) -> dict[int, Weights]:
    """For 1, 2, ... trees the best choice found, with its best weights.

    It adds the heaviest tree next, from many first trees, or drops the lightest.
    """
    ladder: dict[int, Weights] = {}
    chosen = sorted(best, key=lambda i: (-best[i], i))
    while len(chosen) > 1:  # drop the lightest, compute weights again
        chosen = chosen[: min(len(chosen) - 1, count)]
        weights = reweighted(caps, shapes, chosen)
        _keep(ladder, len(chosen), weights)
        chosen = sorted(weights, key=lambda i: (-weights[i], i))
    for size, some in heaviest_first(caps, shapes, count).items():
        _keep(ladder, size, reweighted(caps, shapes, some))
    for size in range(2, count + 1):
        _keep(ladder, size, ladder[size - 1])
    return ladder


def _keep(ladder: dict[int, Weights], size: int, weights: Weights) -> None:
    if size not in ladder or rate_of(weights) > rate_of(ladder[size]):
        ladder[size] = weights


def heaviest_first(caps: Capacities, shapes: Sequence[SpanningTree], count: int) -> dict[int, list[int]]:
    """Greedy choices of 1, 2, ... trees: the next tree is the heaviest that fits.

    Of equally heavy trees it takes the one whose arcs have most left. It starts from the heaviest trees and from others
    at even distances in the list, and keeps the best result.
    """
    spots = np.array([[caps.number[arc] for arc in s.arcs] for s in shapes])
    thickest = np.argsort(-np.array(caps.units)[spots].min(axis=1), kind="stable")[: STARTS // 4].tolist()
    firsts = dict.fromkeys([*thickest, *range(0, len(shapes), -(-len(shapes) // STARTS))])
    most: dict[int, tuple[int, list[int]]] = {}
    for first in firsts:
        left = np.array(caps.units, np.int64)
        chosen: list[int] = []
        total, take = 0, first
        while len(chosen) < count and (bottleneck := int(left[spots[take]].min())):
            left[spots[take]] -= bottleneck
            total += bottleneck
            chosen.append(take)
            if total > most.get(len(chosen), (0, []))[0]:
                most[len(chosen)] = total, list(chosen)
            left_over = left[spots]
            take = int((left_over.min(axis=1) * 10_000_000 + left_over.sum(axis=1)).argmax())
    return {size: some for size, (_, some) in most.items()}


def widest(caps: Capacities, count: int) -> tuple[tuple[int, ...], Fraction]:
    """The set of ranks into which ``count`` trees can carry least: they enter it by at most ``count`` arcs."""
    best: tuple[int, ...] = ()
    least = Fraction(sum(caps.units))
    for inside, entering in cuts_of(caps):
        carried = Fraction(sum(entering[:count]))
        if carried < least:
            best, least = inside, carried
    return best, least


def cuts_of(caps: Capacities) -> list[tuple[tuple[int, ...], list[int]]]:
    """Sets of ranks that every tree enters, with the units of the arcs into them, largest first.

    All sets without the root up to ``CUT_RANKS`` ranks, beyond that the single ranks.
    """
    root = max(caps.root, 0)
    others = [v for v in range(caps.n) if v != root]
    sizes = range(1, caps.n) if caps.n <= CUT_RANKS else (1,)
    found: list[tuple[tuple[int, ...], list[int]]] = []
    for size in sizes:
        for inside in combinations(others, size):
            spots = {k for (u, v), k in caps.number.items() if v in inside and u not in inside}
            found.append((inside, sorted((caps.units[k] for k in spots), reverse=True)))
    return found


class FewestTrees(NamedTuple):
    """Trees of the best rate, and a proved lower bound on the number of trees of any packing of that rate."""

    planned: Solution
    least: int
    proof: str

    @property
    def minimal(self) -> bool:
        """Whether no packing of this rate has fewer trees."""
        return len(self.planned.trees) == self.least


def fewest(problem: Problem) -> FewestTrees:
    """The packing of the best rate with the fewest trees, and the proof that it needs that many.

    A cut proves it where the rate needs as many arcs into some set of ranks as there are trees; otherwise the integer
    program over all spanning trees proves it if it ends.
    """
    caps = problem.capacities
    trees, rate = optimal_trees(problem.oriented, problem.collective, problem.root)
    goal = rate / caps.logical.mbps
    cut, least = narrowest(caps, goal)
    by_cut = f"the rate needs {least} arcs into {name_of(problem.fabric.topology, cut)}"
    if len(trees) == least:
        return FewestTrees(Solution(trees, rate, f"{least} trees, the fewest: {by_cut}"), least, "cut")
    shapes = all_spanning_trees(caps)
    small = shapes is not None and len(shapes) <= searched(caps)
    answer = fewest_for(caps, shapes, goal, nodes=NODES) if shapes and small else None
    if answer is not None and rate_of(answer.weights) == goal:
        if len(answer.weights) < len(trees):
            trees, rate = placed(caps, shapes or [], answer.weights)
        if answer.proved:
            why = f"{len(trees)} trees, the fewest of all spanning trees (integer program)"
            return FewestTrees(Solution(trees, rate, why), len(answer.weights), "integer program")
    return FewestTrees(Solution(trees, rate, f"{len(trees)} trees; at least {least}, as {by_cut}"), least, "")


def narrowest(caps: Capacities, rate: Fraction) -> tuple[tuple[int, ...], int]:
    """The set of ranks into which ``rate`` units need the most arcs, and how many; each tree uses one of its own."""
    best: tuple[int, ...] = ()
    most = 0
    for inside, entering in cuts_of(caps):
        total, count = 0, 0
        while total < rate:
            total += entering[count]
            count += 1
        if count > most:
            best, most = inside, count
    return best, most
