"""The Pareto front of packings between few, shallow and fast (Blink section 3.2.1).

A packing is on the front if no other one found has as few trees, as little depth and as high a rate. :func:`by_depth`
gives the best packing of each depth, for every collective, and on small graphs the proof that no trees of so many hops
are faster. For a collective from one root, or an AllReduce, :mod:`.baselines.few` finds those of 1, 2, ... trees, too.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..errors import ArgumentError
from ..topology.model import Topology
from .answer import check_call
from .baselines import few
from .bounds.verify import verify, verify_depth
from .deadline import NEVER, Deadline
from .exact.weights import best_weights, fewest_for, placed
from .graph.fabric import choose_links, shared_memory
from .graph.logical import Capacities, SpanningTree
from .on_links import METHODS, finished, pack_on_links
from .patterns import shallow
from .problem import Problem, Solution
from .tree import Certificate, Packing

NODES = 50


def pareto(topology: Topology, collective: str, root: int = 0) -> tuple[Packing, ...]:
    """The front, fewest trees first: with numbers of trees where method ``few`` can plan, else by depth alone.

    Raises:
        ArgumentError: for an unknown collective or root, a barrier, one rank, or ranks that share one memory.
        TopologyError: if no links join the ranks. NoPackingError: for an AllToAll of too many ranks.
    """
    problem = _problem(topology, collective, root, NEVER.within(None))
    shapes = few.candidates(problem.capacities) if METHODS["few"].can(problem) else None
    if shapes is not None:
        return front([verify(finished(problem, "few", some), topology) for some in _candidates(problem, shapes)])
    fastest = verify(pack_on_links(problem, "auto"), topology)
    return front([fastest, *(point.packing for point in by_depth(topology, collective, root))])


class DepthPoint(NamedTuple):
    """A packing of trees of at most ``depth`` hops.

    Attributes:
        proof: prices at which no trees of at most so many hops are faster than its bound; None where graphs are too
            large to look at all of them, or there was no time.
    """

    depth: int
    packing: Packing
    proof: Certificate | None

    @property
    def proved(self) -> bool:
        """Whether no trees of so many hops are faster, be it because no trees at all are."""
        return self.packing.optimal or (self.proof is not None and self.proof.bound == self.packing.rate)


def by_depth(
    topology: Topology, collective: str, root: int = 0, *, seconds: float | None = None
) -> tuple[DepthPoint, ...]:
    """The best packing found of each depth at which the rate grows, the least depth first, and last the fastest.

    Depths are hops from rank to rank. Trees are priced exactly in two hops to 16 ranks, in more to 9; paths to 32. Each
    packing is verified, and so is its proof.

    Args:
        seconds: of CPU time for all depths; by default as for :func:`~.packing.pack`.

    Raises:
        ArgumentError: for an unknown collective or root, a barrier, one rank, or ranks that share one memory.
        TopologyError: if no links join the ranks. NoPackingError: for an AllToAll of too many ranks.
    """
    problem = _problem(topology, collective, root, NEVER.within(seconds))
    fastest = verify(pack_on_links(problem, "auto"), topology)
    points: list[DepthPoint] = []
    least = shallow.least_depth(problem) if METHODS["shallow"].can(problem) else fastest.depth
    for depth in range(least, fastest.depth):
        point = _point(problem, depth, first=depth == least)
        if point is not None and not (points and point.packing.rate <= points[-1].packing.rate):
            points.append(point)
        if points and points[-1].packing.rate >= fastest.rate:
            return tuple(points)
    return (*points, DepthPoint(fastest.depth, fastest, None))


def _problem(topology: Topology, collective: str, root: int, deadline: Deadline) -> Problem:
    check_call(topology, collective, root)
    if topology.n < 2 or collective == "barrier" or shared_memory(topology) is not None:
        raise ArgumentError(
            f"{collective} on {topology.name}: depth and rate are compared where several ranks send bytes over links, "
            "not through one memory; take blinkmpi.trees.pack"
        )
    return Problem(choose_links(topology, collective, root), collective, root, deadline=deadline)


def _point(problem: Problem, depth: int, *, first: bool) -> DepthPoint | None:
    """The best packing of one depth, verified; of the least depth there is one in any case."""
    found, proof = shallow.best(problem, depth) or (shallow.plan(problem) if first else None, None)
    if found is None or isinstance(found, str):
        return None
    packing = verify(finished(problem, "shallow", found), problem.fabric.topology)
    if proof is not None:
        verify_depth(packing, proof, depth, problem.fabric.topology)
    return DepthPoint(depth, packing, proof)


def fewest(topology: Topology, collective: str, root: int = 0) -> tuple[Packing, few.FewestTrees]:
    """The packing of the best rate with the fewest trees, and the proof that it has."""
    problem = _problem(topology, collective, root, NEVER)
    result = few.fewest(problem)
    return verify(finished(problem, "few", result.planned), topology), result


def front(packings: Sequence[Packing]) -> tuple[Packing, ...]:
    """The packings that no other one beats, fewest trees first, one of each kind."""
    kept: list[Packing] = []
    for p in sorted(packings, key=lambda p: (len(p.trees), p.depth, -p.rate)):
        if not any(q.depth <= p.depth and q.rate >= p.rate for q in kept):
            kept.append(p)
    return tuple(kept)


def _candidates(problem: Problem, shapes: Sequence[SpanningTree]) -> Iterator[Solution]:
    """The best choices of all spanning trees: of the fewest for the best rate, and of each depth and number."""
    caps = problem.capacities
    best = few.fewest(problem).planned
    yield best
    whole = best_weights(caps, shapes)
    for depth in range(min(s.depth for s in shapes), caps.n):
        some = [s for s in shapes if s.depth <= depth]
        weights = best_weights(caps, some)
        reached = few.rate_of(weights)
        if len(some) <= few.searched(caps) // 2:
            answer = fewest_for(caps, some, reached, nodes=NODES)
            if answer is not None and few.rate_of(answer.weights) == reached:
                weights = answer.weights
        yield _planned(caps, some, weights)
        for _, fewer in sorted(few.climb(caps, some, weights, len(weights)).items()):
            yield _planned(caps, some, fewer)
        if reached >= few.rate_of(whole):
            break
    for _, fewer in sorted(few.climb(caps, shapes, whole, 2 * len(best.trees)).items()):
        yield _planned(caps, shapes, fewer)


def _planned(caps: Capacities, shapes: Sequence[SpanningTree], weights: dict[int, Fraction]) -> Solution:
    trees, rate = placed(caps, shapes, weights)
    deepest = max(t.depth for t in trees)
    return Solution(trees, rate, f"{len(trees)} trees of at most {deepest} hops")
