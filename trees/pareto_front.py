"""The Pareto front of packings between few, shallow and fast (Blink section 3.2.1).

A packing is on the front if no other one found has as few trees, as little depth and as high a rate.
:mod:`.baselines.few` finds them: for every limit on depth that matters, the best packings of 1, 2, ... trees.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..topology.model import Topology
from .baselines import few
from .baselines.pool import least_depth
from .bounds.verify import verify
from .exact.weights import best_weights, fewest_for, most_with, placed
from .graph.fabric import choose_links
from .graph.logical import Capacities, SpanningTree
from .on_links import finished
from .problem import Problem, Solution
from .tree import Packing

NODES = 50


def pareto(topology: Topology, collective: str, root: int = 0, *, search: bool = False) -> tuple[Packing, ...]:
    """The front, fewest trees first.

    Args:
        search: let integer programs search for better packings on small graphs, which takes seconds.

    Raises:
        ArgumentError: for a collective or graph that method ``few`` cannot plan.
    """
    problem = Problem(choose_links(topology, collective, root), collective, root)
    found = [verify(finished(problem, "few", planned), topology) for planned in _candidates(problem, search)]
    return front(found)


def fewest(topology: Topology, collective: str, root: int = 0) -> tuple[Packing, few.FewestTrees]:
    """The packing of the best rate with the fewest trees, and the proof that it has."""
    problem = Problem(choose_links(topology, collective, root), collective, root)
    result = few.fewest(problem)
    return verify(finished(problem, "few", result.planned), topology), result


def front(packings: Sequence[Packing]) -> tuple[Packing, ...]:
    """The packings that no other one beats, fewest trees first, one of each kind."""
    kept: list[Packing] = []
    for p in sorted(packings, key=lambda p: (len(p.trees), p.depth, -p.rate)):
        if not any(q.depth <= p.depth and q.rate >= p.rate for q in kept):
            kept.append(p)
    return tuple(kept)


def _candidates(problem: Problem, search: bool) -> Iterator[Solution]:
    caps = problem.capacities
    best = few.fewest(problem).planned
    yield best
    shapes, complete = few.candidates(caps, None)
    ceiling = few.rate_of(best_weights(caps, shapes))
    for depth in range(least_depth(caps), caps.n):
        some = [s for s in shapes if s.depth <= depth] if complete else few.candidates(caps, depth)[0]
        weights = best_weights(caps, some)
        reached = few.rate_of(weights)
        if complete and len(some) <= few.searched(caps) // 2:
            answer = fewest_for(caps, some, reached, nodes=NODES)
            if answer is not None and few.rate_of(answer.weights) == reached:
                weights = answer.weights
        yield _planned(caps, some, weights)
        for count, fewer in sorted(few.climb(caps, some, weights, len(weights)).items()):
            better = most_with(caps, some, count, nodes=NODES) if search and len(some) <= few.searched(caps) else None
            yield _planned(caps, some, fewer)
            if better is not None and better.weights:
                yield _planned(caps, some, better.weights)
        if reached >= ceiling:
            break
    rest = best_weights(caps, shapes)
    for _, fewer in sorted(few.climb(caps, shapes, rest, 2 * len(best.trees)).items()):
        yield _planned(caps, shapes, fewer)


def _planned(caps: Capacities, shapes: Sequence[SpanningTree], weights: dict[int, Fraction]) -> Solution:
    trees, rate = placed(caps, shapes, weights)
    deepest = max(t.depth for t in trees)
    return Solution(trees, rate, f"{len(trees)} trees of at most {deepest} hops")
